"""Strict JSON: refuses what ``json`` accepts, such as repeated keys, numbers beyond a float, NaN and Infinity."""

import json
import math
import re
from typing import NoReturn


def once(pairs: list[tuple[str, object]]) -> dict:
    """``object_pairs_hook``: the object. Raises ValueError when a key occurs twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands twice")
    return value


def finite(text: str) -> float:
    """``parse_float``: the number. Raises ValueError when it is beyond a float."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]}")
    return value


def no_constant(name: str) -> NoReturn:
    """``parse_constant``: raises ValueError for NaN, Infinity and -Infinity."""
    raise ValueError(f"the number {name[:20]}")


MAX_DEPTH = 32  # of objects and lists in what a model wrote
DECODER = json.JSONDecoder(object_pairs_hook=once, parse_float=finite, parse_constant=no_constant)


_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def decoded(text: str) -> object:
    """The value of JSON ``text``. Raises ValueError, also for half a surrogate pair, which no file of text can hold."""
    value = DECODER.decode(text)
    if _HALF.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError, a ValueError
    return value


def too_deep(value: object, most: int = MAX_DEPTH) -> bool:
    """Whether objects and lists are nested in ``value`` more than ``most`` deep."""
    level = [value]
    for _ in range(most):
        level = [x for v in level for x in (v.values() if isinstance(v, dict) else v if isinstance(v, list) else ())]
    return any(isinstance(v, dict | list) for v in level)
