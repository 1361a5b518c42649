"""What of this package a training depends on, for its record, and what of that differs today."""

from collections.abc import Iterator
from dataclasses import fields

from verl_tasks import __version__
from verl_tasks.method import METHODS
from verl_tasks.places import PACKAGE
from verl_tasks.settings import STACKS, Settings, code_digest, method, shown_default, stack


def state(of_stack: str, by_method: str) -> dict:
    """The version, the default of each variable on a stack and by a method, and a digest of each module of the rewards,
    without comments."""
    defaults = {f.name: shown_default(f) for f in fields(Settings)}
    defaults |= getattr(stack(of_stack), "DEFAULTS", {}) | method(by_method).DEFAULTS
    modules = {path.stem: code_digest(path)[:12] for path in sorted((PACKAGE / "rewards").glob("[a-z]*.py"))}
    return {"version": __version__, "stack": of_stack, "method": by_method, "defaults": defaults, "rewards": modules}


def changes(before: dict) -> Iterator[str]:
    """What differs from the ``before`` of a record, a line each. The run may come from elsewhere: treat it as data."""
    if before.get("stack") not in STACKS or before.get("method") not in METHODS:
        yield f"there is no STACK={before.get('stack')} with METHOD={before.get('method')}"
        return
    now = state(before["stack"], before["method"])
    old, new = _texts(before.get("defaults")), now["defaults"]
    yield from (f"{name} is new, {new[name]}" for name in sorted(new.keys() - old.keys()))
    yield from (f"{name} is gone" for name in sorted(old.keys() - new.keys()))
    both = sorted(old.keys() & new.keys())
    yield from (f"{name} is {new[name]}, was {old[name]}" for name in both if old[name] != new[name])
    old_code, new_code = _texts(before.get("rewards")), now["rewards"]
    every = sorted(old_code.keys() | new_code.keys())
    yield from (f"rewards/{name}.py differs" for name in every if old_code.get(name) != new_code.get(name))


def _texts(value) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}
