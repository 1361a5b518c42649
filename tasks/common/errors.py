"""Errors of a task's own code, told with the line of its own file."""

import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from verl_tasks.places import PACKAGE, ROOT

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^ +File "([^"\n]+)", line (\d+)(?:, in (\S+))?$', re.MULTILINE)
LOGGED = 5  # tracebacks that a process leaves in its log
_logged = 0


class SettingsError(ValueError):
    """A variable has a bad value; the message is one line for the user."""


def said(error: BaseException, length: int = 300) -> str:
    """``error`` in one line of about ``length`` characters: its type, its message, and the line of the task's own file
    that raised it. Of an error of ours that wraps the task's, the task's."""
    place = own_place(error)
    if not place and error.__cause__:
        return said(error.__cause__, length)
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    text = text if len(text) <= length else f"{text[: length - 1]}…"
    return f"{text}{f' ({place})' if place else ''}"


def own_place(error: BaseException) -> str:
    """``file:line, in function`` where ``error`` left the code of the user: the innermost frame outside of this package
    and of packages. Empty where there is none."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        file, name = Path(frame.f_code.co_filename).resolve(), frame.f_code.co_name
        if not file.is_relative_to(ROOT) or file.is_relative_to(PACKAGE) or "site-packages" in file.parts:
            continue
        program = name == "<module>" and frame.f_globals.get("__name__") == "__main__"
        if program or file.name.startswith("<"):  # a task's program, which calls ours; "<frozen runpy>", no file
            continue
        return f"{file.relative_to(ROOT)}:{line}, in {name}"
    return ""


def printed_place(text: str, folders: Iterable[Path]) -> str:
    """``file:line, in function`` of the innermost frame in one of ``folders`` of the traceback that a Python program
    printed last into ``text``; empty without one."""
    frames = _FRAME.findall(text.rpartition(_TRACEBACK)[2])
    for file, line, name in reversed(frames):
        path = Path(file)
        if any(path.is_relative_to(folder) for folder in folders) and "site-packages" not in path.parts:
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
            return f"{shown}:{line}{name and f', in {name}'}"  # a SyntaxError has no name
    return ""


def whole(error: BaseException) -> str:
    """The traceback of ``error``, with those that it wraps; at most its last 8,000 characters."""
    return "".join(traceback.format_exception(error))[-8000:]


def log(error: BaseException) -> None:
    """Leave the traceback of ``error`` in the log of this process, its standard error: of the first LOGGED."""
    global _logged
    _logged += 1
    if _logged <= LOGGED:
        print(whole(error), file=sys.stderr, flush=True)
