"""Answers that are one JSON object: read strictly, and check them against a JSON Schema.

A response is model output: the length, depth and size of numbers are limited before anything reads the values.
"""

import functools
import json
import re
from collections.abc import Iterator
from itertools import islice

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable

from verl_tasks.rewards.answers import RewardError, after_thinking
from verl_tasks.strict_json import finite, no_constant, once, too_deep
from verl_tasks.text import one_line

__all__ = ["read_object", "schema_problem"]  # for tasks

MAX_OBJECT_CHARS = 10_000
MAX_DIGITS = 18  # of an integer: it fits in 64 bits, and no arithmetic on it is slow

_STRUCTURE = re.compile(r'[{}]|"(?:[^"\\]|\\.)*+"?', re.DOTALL)  # a brace, or a string with the braces in it


def read_object(text: str, strict: bool = True) -> dict | None:
    """The JSON object in ``text``, which may have white space around it; None for anything else.

    Also None: NaN and Infinity, a number beyond a float, an integer of more than 18 digits, a repeated key, more than
    10,000 characters, nesting deeper than 32. ``strict=False``: other text may stand around exactly one object. Then
    only the text after any thinking counts, at most 10,000 characters, and each brace before the object must be closed.
    """
    if strict:
        return _parse(text)
    # A value may hold a tag: then the thinking ends before the object, and no tag stands outside of it.
    first = text.partition("</think>")[2] if text.lstrip().startswith("<think>") else text
    for answer, tags in ((after_thinking(text), ()), (first, ("<think>", "</think>"))):
        if len(answer) > MAX_OBJECT_CHARS:
            return None
        found = list(islice(((v, part) for part in braced(answer) if (v := _parse(part)) is not None), 2))
        if len(found) == 1 and not any(tag in answer.replace(found[0][1], "", 1) for tag in tags):
            return found[0][0]
    return None


def _parse(text: str) -> dict | None:
    if len(text) > MAX_OBJECT_CHARS:
        return None
    try:
        value = json.loads(text, object_pairs_hook=once, parse_int=_int, parse_float=finite, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not too_deep(value) else None


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS + text.startswith("-"):
        raise ValueError("a huge integer")
    return int(text)


def braced(text: str) -> Iterator[str]:
    """The outermost ``{…}`` of ``text``, in one pass. Quotation marks count only inside braces."""
    depth = start = position = 0
    while True:
        if depth == 0:
            start = position = text.find("{", position)
            if start < 0:
                return
        match = _STRUCTURE.search(text, position)
        if match is None:
            return
        position = match.end()
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            yield text[start:position]


def schema_problem(value: object, schema: dict) -> str | None:
    """The first problem of ``value`` under the JSON Schema ``schema`` (draft 2020-12), in one line; None if valid.

    Booleans are not numbers. Raises RewardError for an invalid schema, and for a ``$ref`` to another document, which is
    never fetched.
    """
    try:
        error = best_match(_validator(json.dumps(schema, sort_keys=True)).iter_errors(value))
    except Unresolvable as missing:
        raise RewardError(f"no JSON Schema: its $ref {missing.ref} is not in it") from missing
    return one_line(f"{error.json_path}: {error.message}", 200) if error else None


@functools.lru_cache(maxsize=64)
def _validator(schema: str) -> Draft202012Validator:
    schema = json.loads(schema)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise RewardError(f"no JSON Schema: {one_line(f'{error.json_path}: {error.message}', 200)}") from error
    return Draft202012Validator(schema, registry=Registry())  # the default registry would fetch a remote $ref
