"""Scored completions on disk: JSONL, one completion per line, appended while sampling and read by every report."""

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from verl_tasks import errors
from verl_tasks.ends import TOO_LONG
from verl_tasks.files import written_beside
from verl_tasks.rewards.answers import JudgeError, number
from verl_tasks.rows import DataError
from verl_tasks.text import one_line

GREEDY, SAMPLED = "greedy", "sampled"


@dataclass(frozen=True)
class Completion:
    """What an engine returns for one response.

    ``finish_reason``: "stop", "length" (the length limit) or "prompt_too_long" (not sampled). ``entropy``: mean over
    the response's tokens of the entropy of the next-token distribution, in nats (see ``token_entropy`` in engines.py);
    None where an endpoint does not tell it.
    ``think_opened``: the prompt ended in an open ``<think>``, so the response begins inside of it. ``ids``: the tokens
    of a turn of an episode, ``log_probs``: theirs, in nats, before temperature; both empty for other responses.
    """

    response: str
    finish_reason: str
    tokens: int
    entropy: float | None
    think_opened: bool = False
    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """One completion with everything that scoring it again needs, or one episode.

    ``index``: the prompt's place in its parquet file; ``mode``: greedy or sampled; ``sample``: which of the n.
    ``reward``: the dict of the task's reward.py; None where it raised (``error``) or where there is nothing to score.
    Of an episode, ``response`` is all after the prompt as the model saw it, ``tokens`` counts the model's,
    ``finish_reason`` says why it ended, and ``messages`` has what was said after the prompt (rewards/episode.py).
    ``lenient``: whether a lenient reader finds it right (lenient.py); None before it was asked.
    """

    index: int
    mode: str
    sample: int
    response: str
    finish_reason: str
    tokens: int
    entropy: float | None
    prompt: list[dict]
    data_source: str
    ground_truth: str
    extra_info: dict
    reward: dict[str, float] | None
    error: str = ""
    messages: list[dict] = field(default_factory=list)
    lenient: bool | None = None


FIELDS = tuple(f.name for f in fields(Rollout))
TEXT = ("text", lambda value: isinstance(value, str))
WHOLE = ("a whole number from 0 on", lambda value: type(value) is int and 0 <= value < 2**31)
MESSAGES = ("a list of objects", lambda value: isinstance(value, list) and all(isinstance(m, dict) for m in value))
# What a field must be, in words, and whether it is. The ground truth is the reward's to read.
FORMS: dict[str, tuple[str, Callable]] = {
    **dict.fromkeys(("response", "finish_reason", "data_source", "error"), TEXT),
    **dict.fromkeys(("index", "sample", "tokens"), WHOLE),
    **dict.fromkeys(("prompt", "messages"), MESSAGES),
    "mode": (f"{GREEDY} or {SAMPLED}", lambda value: value in (GREEDY, SAMPLED)),
    # NaN is what a model with broken logits has.
    "entropy": ("a number or null", lambda value: value is None or value != value or number(value) is not None),
    "extra_info": ("an object, its key a text", lambda value: isinstance(value.get("key") or "", str)),
    "reward": ("null or an object of numbers", lambda value: value is None or None not in map(number, value.values())),
    "lenient": ("true, false or null", lambda value: value in (True, False, None)),
}


def scored(row: dict, index: int, mode: str, sample: int, completion: Completion, compute_score: Callable) -> Rollout:
    """``completion`` of the RL row ``row``, with its reward."""
    values = asdict(completion)
    del values["ids"], values["log_probs"]
    opened = {"think_opened": True} if values.pop("think_opened") else {}
    values |= {"prompt": row["prompt"], "data_source": row["data_source"], "extra_info": row["extra_info"] | opened}
    truth = row["reward_model"]["ground_truth"]
    return rescored(Rollout(index, mode, sample, **values, ground_truth=truth, reward=None), compute_score)


def rescored(rollout: Rollout, compute_score: Callable) -> Rollout:
    """``rollout`` with its reward from ``compute_score``; an exception becomes its ``error``. Raises JudgeError."""
    if rollout.finish_reason == TOO_LONG or rollout.ground_truth in (None, ""):
        return replace(rollout, reward=None, error="", lenient=None)
    try:
        reward = compute_score(rollout.data_source, rollout.response, rollout.ground_truth, rollout.extra_info)
    except JudgeError:
        raise
    except Exception as error:
        errors.log(error)
        return replace(rollout, reward=None, error=one_line(f"{type(error).__name__}: {error}", 500), lenient=None)
    return replace(rollout, reward=reward, error="", lenient=None)


def in_turn(messages: list[dict]) -> list[str]:
    """The texts of an episode's ``messages``: the model's, then what it read, and so on. A program may ask for the
    first turn with messages of its own: then the model's first text is empty."""
    groups = itertools.groupby(messages, key=lambda message: message["role"] == "assistant")
    before = [""] if messages and messages[0]["role"] != "assistant" else []
    return before + ["\n".join(message["content"] for message in group) for _, group in groups]


def to_line(rollout: Rollout) -> str:
    values = asdict(rollout)
    if not rollout.messages:
        del values["messages"]
    return json.dumps(values) + "\n"


def read_rollouts(path: Path) -> tuple[list[Rollout], int]:
    """The rollouts in ``path``, and the number of skipped lines (0 or 1: the last, cut off). Raises DataError."""
    if not path.is_file():
        raise DataError(f"{path}: no such file of rollouts")
    rollouts, cut = [], 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for place, line in enumerate(file, 1):
            if not line.endswith("\n"):  # each line is written with its end: this one was not finished
                cut = 1
                break
            try:
                record = json.loads(line)
                values = {name: value for name, value in record.items() if name in FIELDS}
                rollout = Rollout(**values)
            except (ValueError, TypeError, AttributeError, RecursionError):
                what = f"is not a rollout (an object with {', '.join(FIELDS)})"
                raise DataError(f"{path}: line {place}: {what}") from None
            if problem := _problem(values):
                raise DataError(f"{path}: line {place}: {problem}")
            rollouts.append(rollout)
    return rollouts, cut


def _problem(values: dict) -> str:
    """What of a rollout's ``values``, which a hand may have edited, no report can read; empty if there is nothing."""
    for name, (what, is_so) in FORMS.items():
        try:
            right = name not in values or is_so(values[name])
        except (AttributeError, TypeError):
            right = False
        if not right:
            return f"{name} must be {what}"
    return "sample must be 0 for a greedy response" if values["mode"] == GREEDY and values["sample"] else ""


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Replace ``path`` by ``rollouts``."""
    with written_beside(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(map(to_line, rollouts))


def in_order(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """By prompt, mode and sample: the order of a report must not depend on which response ended first."""
    return sorted(rollouts, key=lambda r: (r.index, r.mode, r.sample))
