"""tool_calling's evaluation: the shared one, with the mean of each key of the reward, and how the calls go wrong."""

from tasks.tool_calling.reward import compute_score
from verl_tasks import evaluate


def _share(rows: list[dict], holds) -> float:
    return sum(map(holds, rows)) / len(rows) if rows else 0.0


def metrics(scored: list[dict]) -> dict[str, float]:
    """Shares of the sampled completions, 0 if there is nothing to count. ``over_calling``: where no call is expected,
    those that call. ``no_call``: where one is, well-formed responses without any. ``wrong_arguments``: with other
    arguments, of those that call the right functions."""
    rewards = [row["reward"] for row in scored]
    return {
        "over_calling": _share([r for r in rewards if not r["expected"]], lambda r: r["made"] > 0),
        "no_call": _share([r for r in rewards if r["expected"]], lambda r: r["parsed"] and not r["made"]),
        "wrong_arguments": _share([r for r in rewards if r["made"] and r["names"]], lambda r: not r["arguments"]),
    }


if __name__ == "__main__":
    evaluate(compute_score, metrics)
