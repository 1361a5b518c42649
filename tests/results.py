"""Reads docs/results, whose files hold several results by name: `[file](results/FILE#NAME)` links to one of them."""

import functools
import json
import re
from pathlib import Path

from tests.helpers import ROOT

RESULTS = ROOT / "docs/results"


@functools.cache
def metrics() -> dict[str, dict[int, dict]]:
    """verl's metrics of each recorded training, by step."""
    runs: dict[str, dict[int, dict]] = {}
    for line in (RESULTS / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        runs.setdefault(record["run"], {})[record["step"]] = record["data"]
    return runs


@functools.cache
def recipes() -> dict[str, dict]:
    """What each recipe of tests/recipes.toml came to, where it has run."""
    return json.loads((RESULTS / "recipes.json").read_text())


@functools.cache
def names(file: Path) -> set[str]:
    """The names of the results in ``file``; empty where it holds one."""
    if file.suffix == ".txt":
        return set(screens(file))
    if file.suffix == ".jsonl":
        return set(metrics())
    content = json.loads(file.read_text())
    return set(content) if isinstance(content, dict) else set()


@functools.cache
def screens(file: Path) -> dict[str, str]:
    """What each run wrote to the screen."""
    parts = re.split(r"^==== (.+) ====$", file.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def linked(file: Path, name: str):
    """The result that a link names: of a screen its text, else what the JSON holds. Without ``name`` all of the file.
    Raises KeyError where the file has no such result."""
    if file.suffix == ".txt":
        return screens(file)[name] if name else file.read_text()
    content = json.loads(file.read_text())
    return content[name] if name else content
