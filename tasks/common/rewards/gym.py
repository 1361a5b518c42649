"""Any environment of reasoning-gym as a task: its questions as examples, its scorer as a reward.

Scorers of reasoning-gym evaluate answers (``eval``, sympy's ``parse_expr``). They run in a sandbox
(rewards/sandbox.py), and there those two are replaced by parsers that run no code. See docs/REASONING_GYM.md.
"""

import ast
import builtins
import contextlib
import dataclasses
import datetime
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

from tasks.common.data.prepare import Example
from tasks.common.data.rows import DataError
from tasks.common.rewards.answers import last_answer, read_ground_truth
from tasks.common.rewards.sandbox import CallFailed, Sandbox
from tasks.common.text import one_line

ANSWER_FORM = (
    "Think step by step, then put the final answer in <answer></answer>: "
    "nothing but the answer, in the form that is asked for."
)
CALL_SECONDS = 5.0
CHUNK = 1000  # some environments prepare all their entries at once
MAX_SEED = 2**31
RIGHT = 1 - 1e-9


def environments() -> list[str]:
    """Names of all environments, sorted."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def dataset(env: str, config: dict | None = None, seed: int = 0, size: int = 1):
    """The ``ProceduralDataset`` of an environment. ``config``: its own settings, as JSON has them.

    Raises DataError in one line for an unknown environment or setting (with those of a similar name) and for a value
    that the environment refuses.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    config_class = _one_of(env, DATASETS, "ENV: reasoning-gym has no environment")[1]
    if not isinstance(config or {}, dict):
        raise DataError(f"CONFIG of {env}: must be a JSON object, not {config!r:.100}")
    default = config_class()
    names = [field.name for field in dataclasses.fields(config_class) if field.name not in ("seed", "size")]
    values = {}
    for name, value in (config or {}).items():
        if name in ("seed", "size"):
            raise DataError(f"CONFIG of {env}: {name} comes from SEED, TRAIN_SIZE and TEST_SIZE; leave it out")
        _one_of(name, names, f"CONFIG of {env}: there is no setting")
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
    """Entries of an environment without end, different for each ``seed``; repeats are the caller's to leave out.

    The whole entry but its question is the ground truth: some environments do not make the same entry again from the
    same seed in another process. ``demonstration`` is the environment's own answer where its scorer gives that 1.
    Raises DataError for a bad ``env`` or ``config``, and when the environment makes no entry from 100 seeds in a row.
    """
    rng = random.Random(f"{env} {seed}")
    barren = 0
    while True:
        source = dataset(env, config, rng.randrange(MAX_SEED), CHUNK)
        for index in range(CHUNK):
            random.seed(rng.random())  # list_functions draws from the global generator
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # bf prints dots
                    entry = source[index]
                barren = 0
            except Exception as error:  # e.g. no word ladder of that length: the next chunk starts elsewhere
                barren += 1
                if barren == 100:
                    raise DataError(
                        f"ENV={env}: makes no entry with this CONFIG: {one_line(str(error), 200)}"
                    ) from error
                break
            yield _example(source, entry)


def _example(source, entry: dict) -> Example:
    answer = _worked_answer(entry)
    demonstration = None if answer is None else f"<answer>{answer}</answer>"
    if demonstration:
        try:
            with answers_not_run():
                right = score_entry(source, last_answer(demonstration), entry) >= RIGHT
        except Exception:
            right = False
        demonstration = demonstration if right else None
    truth = {"answer": entry["answer"], "metadata": entry["metadata"]}
    return Example(f"{entry['question']}\n\n{ANSWER_FORM}", _encoded(truth), demonstration)


def _worked_answer(entry: dict) -> str | None:
    """An entry's answer as text, from its metadata where any of many is right and ``answer`` is None."""
    metadata = entry["metadata"]
    for answer in (entry["answer"], metadata.get("example_correct_answer"), metadata.get("example_answer")):
        if isinstance(answer, str):
            return answer
    return json.dumps(metadata["possible_answer"]) if "possible_answer" in metadata else None


def scorer(env: str, config: dict | None = None, seconds: float = CALL_SECONDS) -> Callable[[str, object], dict]:
    """``score(response, ground_truth) -> {"score", "acc", "format", "failed"}`` of an environment.

    ``score`` in [0, 1] is what reasoning-gym gives the text in the last <answer></answer>, 0 without one; ``acc`` is 1
    if that is 1, ``format`` 1 if there is such a text, ``failed`` 1 if the scorer raised, was still at it after
    ``seconds``, or died of it; ``score`` is 0 then. ``ground_truth`` is an Example's, or that as JSON text. Nothing in
    a response raises; a bad ``env``, ``config`` or ``ground_truth`` does, at the first call.
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
    return Sandbox("tasks.common.rewards.gym:worker", env, config, seconds=seconds)


# ---- in the worker ----


def worker(env: str, config: str) -> Callable[[str, dict], float]:
    """What the sandbox calls at its start; see ``scorer``. ``config`` is JSON text."""
    source = dataset(env, json.loads(config))
    for module, name, replacement in _replacements():
        setattr(module, name, replacement)
    try:  # sympy and others load more at their first use
        entry = source[0]
        score_entry(source, _worked_answer(entry) or "1", entry)
    except Exception:
        entry = None  # an environment that is broken says so where examples are made

    return lambda answer, truth: score_entry(source, answer, _decoded(truth))


def score_entry(source, answer: str, entry: dict) -> float:
    """What ``source`` gives ``answer``, in [0, 1]; NaN is 0. Two scorers that take wrong answers are mended."""
    metadata = entry["metadata"]
    name = metadata.get("source_dataset")
    if name == "game_of_life_halting":  # theirs gives any text 1: it compares bool(text)
        return float(answer.strip().lower() == entry["answer"].lower())
    value = float(source.score_answer(answer, entry))
    if name == "puzzle24" and sorted(map(int, re.findall(r"\d{1,9}", answer))) != sorted(metadata["numbers"]):
        value = min(value, 0.01)  # theirs takes any four numbers
    return 0.0 if math.isnan(value) else min(1.0, max(0.0, value))


def _replacements() -> Iterator[tuple[object, str, Callable]]:
    """What reasoning-gym would run answers with, (module, name), and what takes its place: ``ast.literal_eval`` for
    ``eval``, ``parse_expression`` for sympy's ``parse_expr``. Code in an answer could otherwise score itself."""
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
    """``parse(text, local_dict=local_dict)`` (sympy's) of a text that is only numbers, operators, elementary functions
    and names that mean nothing else in sympy or Python. Raises ValueError otherwise: for ``Integral`` too, with which
    an integration problem would be its own answer."""
    import sympy

    if _TOKEN.sub("", text):
        raise ValueError("not an expression")
    for name in set(re.findall(_NAME, text)) - _FUNCTIONS - set(local_dict or ()):
        if "__" in name or hasattr(sympy, name) or hasattr(builtins, name):
            raise ValueError(f"{name} is not allowed")
    return parse(text, local_dict=local_dict)


# ---- JSON ----

_KINDS = {"tuple": tuple, "set": set, "frozenset": frozenset, "Fraction": Fraction}


def _encoded(value):
    """``value`` as JSON can hold it; ``_decoded`` gives the same back. Raises DataError for other types."""
    if hasattr(value, "tolist"):  # numpy: an array becomes lists, a scalar a number
        value = value.tolist()
    if value is None or isinstance(value, str | bool | int | float):
        return str(value) if isinstance(value, str) and not isinstance(value, Enum) else value
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and "__kind" not in value:
            return {str(key): _encoded(item) for key, item in value.items()}
        return {"__kind": "dict", "of": [[_encoded(key), _encoded(item)] for key, item in value.items()]}
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
    of = _decoded(value["of"])
    return dict(of) if value["__kind"] == "dict" else _KINDS[value["__kind"]](of)


# ---- settings of an environment ----


def _one_of(name: str, known, problem: str):
    """``known[name]``, or the name itself of a list. Raises DataError with the nearest names."""
    if name in known:
        return known[name] if isinstance(known, dict) else name
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    shown = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(sorted(known)[:12])}, ..."
    raise DataError(f"{problem} {str(name)[:80]!r}; {shown}")


def _value(value, default, where: str):
    """``value``, which JSON gave, as the type of ``default``. Raises DataError where it is of another."""
    try:
        if isinstance(default, Enum):
            return type(default)(value)
        if isinstance(default, datetime.date | datetime.time):
            return type(default).fromisoformat(value)
        if dataclasses.is_dataclass(default):
            return type(default)(**value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {one_line(str(error), 200)}") from error
    if default is None or value is None:
        return value
    kinds = {bool: bool, int: int, float: (int, float), str: str, list: list, tuple: list}.get(type(default), object)
    if not isinstance(value, kinds) or (isinstance(value, bool) and type(default) is not bool):
        raise DataError(f"{where}: must be of type {type(default).__name__}, such as {default!r:.100}")
    return tuple(value) if isinstance(default, tuple) else value


def _part(part):
    """An environment in the ``datasets`` of a composite: {"name", "weight", "config"}, the last two optional."""
    from reasoning_gym.composite import DatasetSpec

    if not isinstance(part, dict) or "name" not in part or part.keys() - {"name", "weight", "config"}:
        raise DataError(f'CONFIG of composite: datasets: {part!r:.100}: must be {{"name", "weight", "config"}}')
    own = part.get("config") or {}
    settings = dataset(part["name"], own).config
    return DatasetSpec(part["name"], part.get("weight", 1), {name: getattr(settings, name) for name in own})
