"""Any environment of reasoning-gym as a task: its questions as examples, its scorer as a reward.

Some scorers evaluate answers (``eval``, sympy's ``parse_expr``). They run in a sandbox (rewards/sandbox.py), where
parsers that run no code replace these two. See docs/REASONING_GYM.md.
"""

import ast
import builtins
import contextlib
import dataclasses
import difflib
import functools
import importlib
import io
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from enum import Enum
from fractions import Fraction
from unittest import mock

from pydantic import TypeAdapter, ValidationError

from verl_tasks.rewards.answers import last_answer, read_ground_truth
from verl_tasks.rewards.math_answer import read_number
from verl_tasks.rewards.sandbox import CallFailed, Sandbox
from verl_tasks.rows import DataError, Example
from verl_tasks.text import one_line

__all__ = ["ANSWER_FORM", "dataset", "examples", "scorer"]  # for tasks

ANSWER_FORM = (
    "Think step by step, then put the final answer in <answer></answer>: "
    "nothing but the answer, in the form that is asked for."
)
CALL_SECONDS = 5.0
CHUNK = 1000  # some environments prepare all their entries at once
MAX_SEED = 2**31
RIGHT = 1 - 1e-9


def dataset(env: str, config: dict | None = None, seed: int = 0, size: int = 1):
    """The ``ProceduralDataset`` of an environment. ``config``: its own settings, as JSON has them.

    Raises DataError in one line for an unknown environment or setting (with similar names) and for a bad value.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    _check_name(env, DATASETS, "ENV: reasoning-gym has no environment")
    if not isinstance(config or {}, dict):
        raise DataError(f"CONFIG of {env}: must be a JSON object, not {config!r:.100}")
    default, values = DATASETS[env][1](), {}
    names = [field.name for field in dataclasses.fields(default) if field.name not in ("seed", "size")]
    for name, value in (config or {}).items():
        if name in ("seed", "size"):
            raise DataError(f"CONFIG of {env}: {name} comes from SEED, TRAIN_SIZE and TEST_SIZE; leave it out")
        _check_name(name, names, f"CONFIG of {env}: there is no setting")
        values[name] = _value(value, getattr(default, name), f"CONFIG of {env}: {name}={value!r:.100}")
    try:
        if env == "composite":
            values["datasets"] = [_part(part) for part in values.get("datasets") or []]
        return reasoning_gym.create_dataset(env, seed=seed, size=size, **values)
    except DataError:
        raise
    except Exception as error:  # they raise all kinds: AssertionError, ValueError, TypeError, KeyError, ...
        shown = json.dumps(config or {})[:200]
        raise DataError(f"CONFIG of {env}: {shown}: {one_line(str(error), 200) or 'not accepted'}") from error


def examples(env: str, config: dict | None, seed: int) -> Iterator[Example]:
    """Endless entries of an environment, different for each ``seed``; the caller leaves out repeats.

    The ground truth is the whole entry except its question: some environments make another entry from the same seed in
    another process. ``demonstration`` is the environment's own answer where its scorer gives that 1. Raises DataError
    for a bad ``env`` or ``config``, and when 100 seeds in a row give no entry.
    """
    rng = random.Random(f"{env} {seed}")
    failures = 0
    while True:
        source = dataset(env, config, rng.randrange(MAX_SEED), CHUNK)
        for index in range(CHUNK):
            random.seed(rng.random())  # list_functions draws from the global generator
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # bf prints dots
                    entry = source[index]
            except Exception as error:  # e.g. no word ladder of that length: the next chunk starts elsewhere
                failures += 1
                if failures == 100:
                    problem = f"makes no entry with this CONFIG: {one_line(str(error), 200)}"
                    raise DataError(f"ENV={env}: {problem}") from error
                break
            failures = 0
            yield _example(source, entry)


def _example(source, entry: dict) -> Example:
    answer, demonstration = _worked_answer(entry), None
    if answer is not None:
        with contextlib.suppress(Exception), answers_not_run():
            if score_entry(source, last_answer(f"<answer>{answer}</answer>"), entry) >= RIGHT:
                demonstration = f"<answer>{answer}</answer>"
    truth = {"answer": entry["answer"], "metadata": entry["metadata"]}
    return Example(f"{entry['question']}\n\n{ANSWER_FORM}", _encoded(truth), demonstration)


def _worked_answer(entry: dict) -> str | None:
    """An entry's answer as text, or an example from its metadata where many answers are right."""
    metadata = entry["metadata"]
    for answer in (entry["answer"], metadata.get("example_correct_answer"), metadata.get("example_answer")):
        if isinstance(answer, str):
            return answer
    return json.dumps(metadata["possible_answer"]) if "possible_answer" in metadata else None


def scorer(env: str, config: dict | None = None, seconds: float = CALL_SECONDS) -> Callable[[str, object], dict]:
    """``score(response, ground_truth) -> {"score", "acc", "format", "failed"}`` of an environment.

    ``score`` in [0, 1]: reasoning-gym's score of the text in the last <answer></answer>, 0 without one. ``acc``: 1 if
    that is 1. ``format``: 1 if there is such a text. ``failed``: 1 if the scorer raised, died or took more than
    ``seconds``; ``score`` is 0 then. ``ground_truth``: an Example's, or its JSON text. A response never raises; a bad
    ``env``, ``config`` or ``ground_truth`` does, at the first call.
    """
    config_text = json.dumps(config or {}, sort_keys=True)

    def score(response: str, ground_truth) -> dict[str, float]:
        truth = read_ground_truth(ground_truth)
        if not isinstance(truth, dict) or not {"answer", "metadata"} <= truth.keys():
            raise DataError(f"{env}: the ground truth must be {{answer, metadata}}, as `make data` wrote it")
        answer = last_answer(response)
        value, failed = 0.0, 0.0
        if answer is not None:  # an empty one may be right
            try:
                value = float(_sandbox(env, config_text, seconds).call(answer, truth))
            except CallFailed:
                failed = 1.0
        return {"score": value, "acc": float(value >= RIGHT), "format": float(answer is not None), "failed": failed}

    return score


@functools.cache
def _sandbox(env: str, config: str, seconds: float) -> Sandbox:
    return Sandbox("verl_tasks.rewards.gym:worker", env, config, seconds=seconds)


# ---- in the worker ----


def worker(env: str, config: str) -> Callable[[str, dict], float]:
    """What the sandbox calls at its start; see ``scorer``. ``config`` is JSON text."""
    source = dataset(env, json.loads(config))
    for module, name, replacement in _replacements():
        setattr(module, name, replacement)
    with contextlib.suppress(Exception):  # loads what sympy and others need; ``examples`` reports a broken environment
        entry = source[0]
        score_entry(source, _worked_answer(entry) or "1", entry)
    return lambda answer, truth: score_entry(source, answer, _decoded(truth))


def score_entry(source, answer: str, entry: dict) -> float:
    """The score of ``answer`` by ``source``, in [0, 1]; NaN is 0. Corrects the scorers that accept wrong answers."""
    metadata = entry["metadata"]
    name = metadata.get("source_dataset")
    if _is_non_finite(answer) and not _is_non_finite(str(entry["answer"])):  # theirs: min(1.0, nan) is 1.0
        return 0.0
    if name == "coin_flip":  # theirs gives 0 and any other beginning of the answer 1
        return float(_is_probability(answer, entry["answer"]))
    if name == "game_of_life_halting":  # theirs gives any text 1: it compares bool(text)
        return float(answer.strip().lower() == entry["answer"].lower())
    if name == "gsm_symbolic":  # theirs takes the first digits of any text: -1, 1/2 and "1 or 2" are 1
        return 1.0 if read_number(answer) == Fraction(entry["answer"]) else 0.01 * bool(re.search(r"\d", answer))
    value = float(source.score_answer(answer, entry))
    if name == "spell_backward" and answer.lower() != entry["answer"].lower():
        value = min(value, 0.8)  # theirs means to, but adds up 1/n to 0.999...
    if name == "puzzle24" and sorted(map(int, re.findall(r"\d{1,9}", answer))) != sorted(metadata["numbers"]):
        value = min(value, 0.01)  # theirs takes any four numbers
    return 0.0 if math.isnan(value) else min(1.0, max(0.0, value))


def _is_non_finite(text: str) -> bool:
    """Whether ``text`` is numbers alone, one of them NaN or infinite; ``nanj`` and ``nani`` are complex ones."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    return any(word.startswith(("nan", "inf")) for word in words) and all(map(_NUMBER_WORD.fullmatch, words))


_NUMBER_WORD = re.compile(r"(?:nan|inf|infinity)?[ij]?|e")


def _is_probability(answer: str, truth: str) -> bool:
    """Whether ``answer``, a decimal or a fraction, is ``truth`` to 0.0001, as reasoning-gym has it, and to 1 %."""
    try:
        given, true = (float(Fraction(text.strip().replace(",", ""))) for text in (answer, truth))
    except (ValueError, ZeroDivisionError, OverflowError):
        return False
    return abs(given - true) <= min(1e-4, 0.01 * true)


def _replacements() -> Iterator[tuple[object, str, Callable]]:
    """(module, name, replacement): ``ast.literal_eval`` for ``eval``, ``parse_expression`` for sympy's ``parse_expr``.
    With the originals, code in an answer could score itself."""
    from sympy.parsing.sympy_parser import parse_expr

    algorithmic = ("binary_matrix", "number_sorting", "spiral_matrix", "string_insertion")
    for name in (*(f"algorithmic.{name}" for name in algorithmic), "games.n_queens"):
        yield importlib.import_module(f"reasoning_gym.{name}"), "eval", ast.literal_eval
    for name in ("sympy", "reasoning_gym.games.countdown", "reasoning_gym.games.puzzle24"):
        yield importlib.import_module(name), "parse_expr", functools.partial(parse_expression, parse_expr)


@contextlib.contextmanager
def answers_not_run() -> Iterator[None]:
    """In this block reasoning-gym's scorers run no code that an answer holds, as in the worker."""
    with contextlib.ExitStack() as stack:
        for module, name, replacement in _replacements():
            stack.enter_context(mock.patch.object(module, name, replacement, create=True))
        yield


_NAME = r"[A-Za-z_][A-Za-z_0-9]*"
_TOKEN = re.compile(rf"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|{_NAME}|[-+*/^(), \t\r\n]")
_FUNCTIONS = {"E", "I", "pi", "exp", "log", "ln", "sqrt", "cbrt", "root", "Abs", "sign", "factorial", "Rational", "erf"}
_FUNCTIONS |= {p + f + h for f in ("sin", "cos", "tan", "cot", "sec", "csc") for p in ("", "a") for h in ("", "h")}


def parse_expression(parse: Callable, text: str, local_dict: dict | None = None):
    """``parse(text, local_dict=local_dict)`` (sympy's) of numbers, operators, elementary functions and free names.

    Raises ValueError for names of sympy or Python, also ``Integral``: an integration problem would be its own answer.
    """
    import sympy

    if _TOKEN.sub("", text):
        raise ValueError("not an expression")
    for name in set(re.findall(_NAME, text)) - _FUNCTIONS - set(local_dict or ()):
        if "__" in name or hasattr(sympy, name) or hasattr(builtins, name):
            raise ValueError(f"{name} is not allowed")
    return parse(text, local_dict=local_dict)


# ---- JSON ----

_KINDS = {"tuple": tuple, "set": set, "frozenset": frozenset, "Fraction": Fraction, "dict": dict}


def _encoded(value):
    """``value`` as JSON can hold it; ``_decoded`` gives the same back. Raises DataError for other types."""
    if hasattr(value, "tolist"):  # numpy: an array becomes lists, a scalar a number
        value = value.tolist()
    if isinstance(value, str):
        return value if isinstance(value, Enum) else str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and "__kind" not in value:
            return {str(key): _encoded(item) for key, item in value.items()}
        return {"__kind": "dict", "of": [_encoded(list(pair)) for pair in value.items()]}
    kind = type(value).__name__
    if kind not in _KINDS:
        raise DataError(f"an entry holds a {kind}, which cannot be stored")
    return {"__kind": kind, "of": str(value) if kind == "Fraction" else [_encoded(item) for item in value]}


def _decoded(value):
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__kind" not in value:
        return {key: _decoded(item) for key, item in value.items()}
    return _KINDS[value["__kind"]](_decoded(value["of"]))


# ---- settings of an environment ----


def _check_name(name: str, known, problem: str) -> None:
    """Raise DataError with the nearest names unless ``name`` is in ``known``."""
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
        shown = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(sorted(known)[:12])}, ..."
        raise DataError(f"{problem} {str(name)[:80]!r}; {shown}")


def _value(value, default, where: str):
    """``value`` from JSON as the type of ``default``. Raises DataError if it does not fit."""
    if default is None or value is None:
        return value
    try:
        return TypeAdapter(type(default)).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise DataError(f"{where}: {one_line(error.errors()[0]['msg'], 200)}, such as {default!r:.100}") from error


def _part(part):
    """An environment in the ``datasets`` of a composite: {"name", "weight", "config"}, the last two optional."""
    from reasoning_gym.composite import DatasetSpec

    if not isinstance(part, dict) or "name" not in part or part.keys() - {"name", "weight", "config"}:
        raise DataError(f'CONFIG of composite: datasets: {part!r:.100}: must be {{"name", "weight", "config"}}')
    own = part.get("config") or {}
    settings = dataset(part["name"], own).config
    return DatasetSpec(part["name"], part.get("weight", 1), {name: getattr(settings, name) for name in own})
