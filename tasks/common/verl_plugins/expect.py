"""A patch of verl or vLLM stops the run when the line that it changes is no longer there."""

import inspect
import sys


def expect(function, *lines: str) -> None:
    """Raise RuntimeError unless the source of ``function`` contains all ``lines``."""
    source = inspect.getsource(function)
    for line in lines:
        if line not in source:
            caller = sys._getframe(1).f_globals["__name__"]
            raise RuntimeError(
                f"{function.__module__}.{function.__qualname__} no longer contains `{line}`: "
                f"check the patch of it in {caller}"
            )
