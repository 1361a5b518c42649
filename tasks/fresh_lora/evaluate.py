"""Evaluation of fresh_lora: the shared one (tasks/common/evaluate.py) and the task's own metrics."""

from tasks.common import evaluate
from tasks.fresh_lora.reward import compute_score


def metrics(scored: list[dict]) -> dict[str, float]:
    """The task's own metrics, from the sampled completions with their rewards."""
    return {"format": sum(row["reward"]["format"] for row in scored) / len(scored)}


if __name__ == "__main__":
    evaluate.main(compute_score, metrics)
