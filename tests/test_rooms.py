"""The rule of imports in docs/ARCHITECTURE.md, kept over the syntax trees."""

import ast
from pathlib import Path

from tasks.common.settings import ROOT

COMMON = ROOT / "tasks/common"
# A room imports from the rooms of earlier lines and from its own.
LEVELS = (
    {"ground"},
    {"install", "machine", "models"},
    {"data"},
    {"rewards", "runs"},
    {"evaluation", "training"},
    {"verl_plugins", "reports", "launch"},
)
NEVER_IMPORTED = {"reports", "launch"}
BESIDES = {("stacks", "verl_plugins"), ("rewards", "runs")}


def room(name: str) -> str:
    """The room of a dotted module of tasks.common; its own modules are the ground."""
    parts = name.split(".")[2:]
    return parts[0] if parts and (COMMON / parts[0]).is_dir() else "ground"


def level(name: str) -> int:
    return next((number for number, rooms in enumerate(LEVELS) if name in rooms), len(LEVELS))


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("tasks.")}


def wrong(here: str, there: str) -> bool:
    if here == there or (here, there) == ("stacks", "verl_plugins"):
        return False
    return there in NEVER_IMPORTED or level(there) >= level(here)


def test_no_room_imports_from_a_later_one():
    arrows = {
        (str(file.relative_to(COMMON)), name, room("tasks.common." + ".".join(file.relative_to(COMMON).parts)))
        for file in COMMON.rglob("*.py")
        for name in imports(file)
    }
    assert len(arrows) > 100  # the trees were read
    foreign = [(file, name) for file, name, _ in arrows if not name.startswith("tasks.common")]
    assert not foreign, "tasks/common knows no task"
    assert sorted((file, name) for file, name, here in arrows if wrong(here, room(name))) == []
