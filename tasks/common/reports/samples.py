"""Responses with their rewards, as a training and an evaluation leave them on disk."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from verl_tasks.evaluation.rollouts import in_turn
from verl_tasks.files import regular
from verl_tasks.rewards.answers import number

NO_REWARD = ("input", "output", "gts", "step", "uid", "turns")  # beside a dumped response


@dataclass(frozen=True)
class Sample:
    """``said``: the response; of an episode what the model said, then what it read, and so on. ``rewards``: with the
    score first of all; without it where the reward raised."""

    prompt: str
    said: list[str]
    truth: str
    rewards: dict[str, float]


def of_step(file: Path) -> Iterator[Sample]:
    """verl's rollouts of a training step, or of a validation, that have a response and a finite score."""
    for row in rows(file):
        if not isinstance(row, dict) or number(row.get("score")) is None or not isinstance(row.get("output"), str):
            continue
        turns, truth = row.get("turns"), row.get("gts", "(none)")
        found = {name: number(value) for name, value in row.items() if name not in NO_REWARD}
        rewards = {name: value for name, value in found.items() if value is not None}
        said = [*map(str, turns)] if isinstance(turns, list) and len(turns) > 1 else [row["output"]]
        yield Sample(str(row.get("input", "")), said, truth if isinstance(truth, str) else json.dumps(truth), rewards)


def of_evaluation(file: Path) -> Iterator[Sample]:
    """The rollouts of `make eval`."""
    for row in rows(file):
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in row["prompt"])
        said = in_turn(row.get("messages", [])) or [row["response"]]
        yield Sample(prompt, said, row["ground_truth"], row["reward"] or {})


def rows(file: Path) -> Iterator[dict]:
    """The whole lines of JSON in ``file``; none if it is not there."""
    with suppress(OSError), regular(file).open(errors="replace") as lines:
        for line in lines:
            with suppress(ValueError):  # it is being written, or was when the power failed
                yield json.loads(line)
