"""Patches of verl and vLLM stop the run, and do nothing wrong, once the line that they answer has changed."""

import inspect
import sys


def expect(function, *lines: str) -> None:
    """Raise RuntimeError unless every one of ``lines`` still stands in the source of ``function``."""
    source = inspect.getsource(function)
    for line in lines:
        if line not in source:
            caller = sys._getframe(1).f_globals["__name__"]
            raise RuntimeError(
                f"{function.__module__}.{function.__qualname__} no longer contains `{line}`: "
                f"the patch for it in {caller} must be looked at again"
            )
