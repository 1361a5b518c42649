"""Countdown's evaluation: the shared one, with the share of responses that use exactly the given numbers."""

from tasks.common import evaluate
from tasks.countdown.reward import compute_score


def metrics(scored: list[dict]) -> dict[str, float]:
    """The task's own metrics of the sampled completions, each in [0, 1]."""
    return {name: sum(row["reward"][name] for row in scored) / len(scored) for name in ("format", "numbers")}


if __name__ == "__main__":
    evaluate.main(compute_score, metrics)
