"""Filters of the template's own; cookiecutter finds them by `_extensions` in cookiecutter.json."""

import json
import re
import sys
from itertools import islice
from pathlib import Path

from cookiecutter.utils import simple_filter

WIDTH = 120
ENTRIES = 16
USUAL = (512, 128)
# About what a tokenizer of 50,000 tokens makes of text, rather too many; of other scripts a token a byte.
_TOKEN = re.compile(r" ?[A-Za-z]{1,6}|\s+|.")
_FRAME = 32  # tokens of a chat template


@simple_filter
def lengths(env: str, config: str) -> tuple[int, int]:
    """Tokens, about, of the longest prompt and of the longest answer among some entries of a reasoning-gym environment,
    in steps of 64; 0 for the answer where the entries have none, USUAL where reasoning-gym is not installed."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    try:
        from tasks.common.gym import examples

        found = list(islice(examples(env, json.loads(config), seed=0), ENTRIES))
    except (ImportError, ValueError):
        return USUAL
    finally:
        sys.path.pop()
    answers = [_tokens(e.demonstration) for e in found if e.demonstration]
    return _rounded(max(_tokens(e.prompt) for e in found)), _rounded(max(answers)) if answers else 0


def _rounded(tokens: int) -> int:
    return 64 * ((tokens + _FRAME) * 5 // 4 // 64 + 1)


def _tokens(text: str) -> int:
    return sum(len(token.encode()) if not token.isascii() else 1 for token in _TOKEN.findall(text))


@simple_filter
def literal(text: str) -> str:
    """JSON text as Python source, as `ruff format` would write it behind ``CONFIG = ``."""
    return _source(json.loads(text), 0, len("CONFIG = "))


def _source(value, indent: int, before: int) -> str:
    """``value`` on one line if that fits behind ``before`` characters, else an item a line."""
    line = _line(value)
    if before + len(line) <= WIDTH or not value or not isinstance(value, dict | list):
        return line
    inner = " " * (indent + 4)
    if isinstance(value, dict):
        heads, items = [f"{inner}{_line(key)}: " for key in value], value.values()
    else:
        heads, items = [inner] * len(value), value
    body = [f"{head}{_source(item, indent + 4, len(head) + 1)},\n" for head, item in zip(heads, items, strict=True)]
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    return f"{opened}\n{''.join(body)}{' ' * indent}{closed}"


def _line(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_line(key)}: {_line(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_line, value)) + "]"
    if isinstance(value, str) and '"' not in value:
        return '"' + repr(value + '"')[1:-2].replace("\\'", "'") + '"'  # repr takes ' where the text has a "
    return repr(value).replace("e+", "e") if isinstance(value, float) else repr(value)
