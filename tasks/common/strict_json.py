"""Hooks for ``json`` that refuse what its reader lets pass: keys given twice, numbers beyond a float, NaN, Infinity."""

import math
from typing import NoReturn


def once(pairs: list[tuple[str, object]]) -> dict:
    """``object_pairs_hook``: the object. Raises ValueError when a key stands twice in it."""
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
