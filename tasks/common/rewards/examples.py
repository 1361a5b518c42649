"""A task's examples.jsonl: responses with the score that each must get."""

import json
from collections.abc import Callable
from pathlib import Path

from tasks.common.rewards.answers import RewardError


def check_examples(task_dir: Path, compute_score: Callable[..., dict]) -> int:
    """Score every row of ``task_dir/examples.jsonl`` (``ground_truth``, ``response``, ``score``, and ``variant`` and
    ``extra_info`` where the reward needs them); return their number.

    Raises RewardError naming the line whose score differs from the one it states, or that is no such row.
    """
    path = Path(task_dir) / "examples.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines:
        raise RewardError(f"{path}: needs at least one row {{ground_truth, response, score}}")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            truth, response, stated = row["ground_truth"], row["response"], float(row["score"])
        except (ValueError, TypeError, KeyError) as error:
            problem = f"not a row {{ground_truth, response, score}} ({error})"
            raise RewardError(f"{path}: line {number}: {problem}") from error
        kwargs = {name: row[name] for name in ("variant", "extra_info") if name in row}
        score = compute_score(Path(task_dir).name, response, truth, **kwargs)["score"]
        if abs(score - stated) > 1e-6:
            raise RewardError(f"{path}: line {number}: the score is {score}, the row states {stated}")
    return len(lines)
