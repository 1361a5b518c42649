"""The rule of imports in docs/ARCHITECTURE.md, kept over the syntax trees."""

import ast

from verl_tasks.settings import ROOT

COMMON = ROOT / "tasks/common"
# A room imports from the rooms of earlier lines and from its own.
LEVELS = (
    {"ground"},
    {"install", "machine", "models"},
    {"rewards", "runs"},
    {"data"},
    {"evaluation", "training"},
    {"verl_plugins", "reports"},
    {"launch"},
)
NEVER_IMPORTED = {"verl_plugins", "launch"}
BY_NAME = ("import_module", "__import__", "resolve_name", "run_module")
PLUGINS = {"verl_tasks.training.methods.{name}", "verl_tasks.stacks.{name}"}  # METHOD and STACK choose one


def room(name: str) -> str:
    """The room of a dotted module of verl_tasks; its own modules are the ground."""
    parts = name.split(".")[2:]
    return parts[0] if parts and (COMMON / parts[0]).is_dir() else "ground"


def level(name: str) -> int:
    return next((number for number, rooms in enumerate(LEVELS) if name in rooms), len(LEVELS))


def imports(tree: ast.AST) -> set[str]:
    """Modules of this repository that ``tree`` imports, also those of verl_tasks by a name in text."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            texts = {ast.unparse(argument).removeprefix("f").strip("'") for argument in node.args}
            names |= {text for text in texts if text.startswith("verl_tasks.")} - PLUGINS
    return {name for name in names if name.startswith("tasks.")}


def wrong(here: str, there: str) -> bool:
    return here != there and (there in NEVER_IMPORTED or level(there) >= level(here))


def test_no_room_imports_from_a_later_one():
    arrows = {
        (str(file.relative_to(COMMON)), name, room("verl_tasks." + ".".join(file.relative_to(COMMON).parts)))
        for file in COMMON.rglob("*.py")
        for name in imports(ast.parse(file.read_text()))
    }
    assert len(arrows) > 100  # the trees were read
    foreign = [(file, name) for file, name, _ in arrows if not name.startswith("verl_tasks")]
    assert not foreign, "tasks/common knows no task"
    assert sorted((file, name) for file, name, here in arrows if wrong(here, room(name))) == []


def test_an_import_by_a_name_in_text_counts():
    code = """importlib.import_module("verl_tasks.rewards.judge")
import_module(f'verl_tasks.launch.{name}'), import_module(f"tasks.{task}.reward"), import_module(name)"""
    assert imports(ast.parse(code)) == {"verl_tasks.rewards.judge", "verl_tasks.launch.{name}"}
