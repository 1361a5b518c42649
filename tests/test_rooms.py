"""The rule of imports in docs/ARCHITECTURE.md, kept over the syntax trees."""

import ast
import re
import subprocess
import sys

import verl_tasks
from tests.helpers import ROOT, TASKS

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
# METHOD and STACK choose one; a task imports what the package offers.
PLUGINS = {"verl_tasks.training.methods.{name}", "verl_tasks.stacks.{name}", "verl_tasks.{PUBLIC[name]}"}


def room(name: str) -> str:
    """The room of a dotted module of verl_tasks; its own modules are the ground."""
    parts = name.split(".")[1:]
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
    return {name for name in names if name.startswith(("tasks.", "verl_tasks."))}


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
    assert not {name for _, name, _ in arrows} & {f"verl_tasks.{name}" for name in verl_tasks.PUBLIC}, (
        "those are for tasks"
    )


def test_an_import_by_a_name_in_text_counts():
    code = """importlib.import_module("verl_tasks.rewards.judge")
import_module(f'verl_tasks.launch.{name}'), import_module(f"tasks.{task}.reward"), import_module(name)"""
    assert imports(ast.parse(code)) == {"verl_tasks.rewards.judge", "verl_tasks.launch.{name}"}


# Programs of their own beside a task's stages, with the evaluation's parts.
PROGRAMS = ("simulate.py", "bfcl.py")


def test_tasks_and_the_template_import_only_what_the_package_offers():
    files = [file for task in TASKS for file in (ROOT / "tasks" / task).glob("*.py")]
    names = set()
    for file in files:
        if file.name not in PROGRAMS and not file.name.startswith("test_"):
            names |= {
                (str(file), name) for name in imports(ast.parse(file.read_text())) if name.startswith("verl_tasks")
            }
    for file in (ROOT / "template").rglob("*"):
        if file.is_file() and file.parent.name != "hooks":
            names |= {(str(file), name) for name in re.findall(r"verl_tasks\.\w+", file.read_text())}
    offered = {f"verl_tasks.{name}" for name in verl_tasks.PUBLIC}
    assert len(names) > 30 and {each for each in names if each[1] not in offered} == set()


def test_every_name_that_the_package_offers_is_there_and_documented():
    page = (ROOT / "docs/LIBRARY.md").read_text()
    for name in verl_tasks.PUBLIC:
        assert getattr(verl_tasks, name).__doc__ or name.isupper(), name
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == set(verl_tasks.PUBLIC)


def test_the_package_has_one_name_and_imports_nothing_until_it_is_asked():
    code = """import sys, verl_tasks
heavy = {"torch", "pandas", "numpy", "pyarrow", "jsonschema"}
assert not heavy & {*sys.modules}, heavy & {*sys.modules}
import tasks.common  # the old name"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert said == "ImportError: tasks.common: the package is verl_tasks: `import verl_tasks`"  # the old name
