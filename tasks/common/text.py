"""Text that a model wrote: made harmless before it is shown, and compared."""

import os
import re
import sys
from collections.abc import Sequence
from os.path import commonprefix

# All control characters but line feed and tab: a response must not move the cursor or set the terminal's title.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def show(text: str) -> None:
    """Print ``text`` of a command that only shows something: a reader that has seen enough, as `head` has, is no error,
    and gets nothing more."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str) -> str:
    """``text`` without control characters, and ``encodable``."""
    return encodable(_CONTROL.sub("", text))


def encodable(text: str) -> str:
    """``text`` with ? for half a surrogate pair: a model can write one in JSON, and neither UTF-8 nor a tokenizer takes
    it."""
    return text.encode("utf-8", "replace").decode()


def common_start(sequences: Sequence[Sequence]) -> int:
    """With how many characters or tokens all of ``sequences`` begin alike."""
    return len(commonprefix(sequences))  # noqa: RUF071 - these are no paths


def without_middle(text: str, limit: int) -> str:
    """``text`` as ``printable``, without its middle beyond ``limit`` characters: answers stand last."""
    text, half = printable(text), limit // 2
    left_out = len(text) - 2 * half
    return text if len(text) <= limit else f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"


def one_line(text: str, length: int = 100) -> str:
    """``text`` as one line of at most ``length`` characters."""
    text = " ".join(printable(text).split())
    return text if len(text) <= length else text[: length - 1] + "…"
