"""What a check before a training found."""

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of a check: ``state`` is ok, warning or error; ``fix`` is the remedy."""

    state: str
    what: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.text}" + (f"; {self.fix}" if self.fix else "")


ok, warning, error = (functools.partial(Finding, state) for state in ("ok", "warning", "error"))
