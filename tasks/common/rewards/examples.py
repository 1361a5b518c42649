"""A task's examples.jsonl: responses, or the model's messages of an episode, with the score that each must get, or
must stay ``below``."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.environment import Environment, replayed
from verl_tasks.rows import chat, rl_row


def check_examples(task_dir: Path, scored: Callable[..., dict] | type[Environment]) -> int:
    """Score every row of ``task_dir/examples.jsonl`` with ``scored``, a compute_score or an Environment; return their
    number, at least 1.

    For a reward a row has ``ground_truth``, ``response``, ``score``, ``below`` or ``acc`` (1: counts as right), and
    ``variant`` and ``extra_info`` where it needs them; for an environment ``responses``, the model's messages, and
    ``prompt`` where it reads that. Raises RewardError naming the line whose score is not as it states, or that is no
    such row; and for an episode that does not end with its last message, unless the row has ``done`` false.
    """
    return (_episodes if isinstance(scored, type) else _responses)(task_dir, scored)


def most_stated(task_dir: Path) -> float:
    """The highest score that a row of ``task_dir/examples.jsonl`` states, at least 1; 1 where no row can be read."""
    with suppress(RewardError, OSError, ValueError, TypeError):
        return max(1.0, *(float(row.get("score", 1)) for _, row in _rows(task_dir, "ground_truth")))
    return 1.0


def _responses(task_dir: Path, compute_score: Callable[..., dict]) -> int:
    rows = _rows(task_dir, "response")
    for place, row in rows:
        kwargs = {name: row[name] for name in ("variant", "extra_info") if name in row}
        result = compute_score(Path(task_dir).name, row["response"], row["ground_truth"], **kwargs)
        _compare(place, result["score"], row)
        if "acc" in row and (right := bool(result.get("acc"))) != bool(row["acc"]):
            raise RewardError(f"{place}: acc is {right:d}, the row states {bool(row['acc']):d}")
    return len(rows)


def _episodes(task_dir: Path, environment: type[Environment]) -> int:
    rows = _rows(task_dir, "responses")
    for number, (place, row) in enumerate(rows):
        messages = chat(row.get("prompt", "-"))
        rl = rl_row(Path(task_dir).name, messages, row["ground_truth"], "examples", number)
        ends = row.get("done", True)
        score, _, done = replayed(environment, rl, row["responses"], spare=not ends)
        _compare(place, score, row)
        if ends and not done:
            raise RewardError(f"{place}: the episode goes on after the last of its responses")
    return len(rows)


def _compare(place: str, score: float, row: dict) -> None:
    if "score" in row and abs(score - float(row["score"])) > 1e-6:
        raise RewardError(f"{place}: the score is {score}, the row states {float(row['score'])}")
    if "below" in row and not score < float(row["below"]):
        raise RewardError(f"{place}: the score is {score}, the row states less than {float(row['below'])}")


def _rows(task_dir: Path, response: str) -> list[tuple[str, dict]]:
    """Place and fields of each row. Raises RewardError for a row without ``response``, and where there is none."""
    path, form = Path(task_dir) / "examples.jsonl", f"{{ground_truth, {response}, score}}"
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines:
        raise RewardError(f"{path}: needs at least one row {form}")
    rows = []
    for number, line in enumerate(lines, 1):
        place = f"{path}: line {number}"
        try:
            row = json.loads(line)
            stated = next((name for name in ("below", "score", "acc") if name in row), "score")
            _ = row["ground_truth"], row[response], float(row[stated])
        except (ValueError, TypeError, KeyError) as error:
            raise RewardError(f"{place}: not a row {form} ({error})") from error
        rows.append((place, row))
    return rows
