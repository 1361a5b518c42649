"""Filters of the template's own; cookiecutter finds them by `_extensions` in cookiecutter.json."""

import json

from cookiecutter.utils import simple_filter

WIDTH = 120


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
    body = [
        f"{head}{_source(item, indent + 4, len(head) + 1)},\n" for head, item in zip(heads, items, strict=True)
    ]
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    return f"{opened}\n{''.join(body)}{' ' * indent}{closed}"


def _line(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_line(key)}: {_line(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_line, value)) + "]"
    if isinstance(value, str) and '"' not in value:
        return '"' + repr(value + '"')[1:-2].replace("\\'", "'") + '"'  # repr takes ' where the text has a "
    return repr(value)
