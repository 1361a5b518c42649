"""The rule of imports in docs/ARCHITECTURE.md, kept over the syntax trees."""

import ast
import re
import subprocess
import sys
from types import ModuleType

import pytest

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


def not_offered(text: str) -> set[str]:
    """What ``text``, of a task or of the template, takes of verl_tasks that the package does not offer."""
    flat = {each for each in re.findall(r"verl_tasks\.\w+", text) if each.partition(".")[2] not in verl_tasks.PUBLIC}
    modules = [name for name in verl_tasks.PUBLIC if isinstance(getattr(verl_tasks, name), ModuleType)]
    lists = re.findall(r"from verl_tasks import (\([^)]*\)|[\w, ]+)", text)
    names = {name for each in lists for name in re.findall(r"\w+", each)}
    used = re.findall(rf"(?<![\w./'\"])({'|'.join(modules)})\.(\w+)", text)
    inner = {f"{name}.{part}" for name, part in used if name in names and part not in getattr(verl_tasks, name).__all__}
    return flat | names - verl_tasks.PUBLIC.keys() | inner


def test_tasks_and_the_template_import_only_what_the_package_offers():
    files = [file for task in TASKS for file in (ROOT / "tasks" / task).glob("*.py")]
    files += [file for file in (ROOT / "template").rglob("*") if file.suffix in (".py", ".jinja")]
    found = {str(file): not_offered(file.read_text()) for file in files}
    assert len(found) > 40 and {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "text",
    [
        "from verl_tasks.rows import chat",
        "from verl_tasks import chat",
        "import verl_tasks.rows",
        "from verl_tasks import prepare\nprepare._prepare()",
    ],
)
def test_what_is_internal_is_found(text):
    assert not_offered(text)


def test_every_name_that_the_package_offers_is_there_and_documented():
    page = (ROOT / "docs/LIBRARY.md").read_text()
    of_modules = set()
    for name in verl_tasks.PUBLIC:
        found = getattr(verl_tasks, name)
        assert found.__doc__, name
        if isinstance(found, ModuleType):
            of_modules |= {f"{name}.{part}" for part in found.__all__ if part not in verl_tasks.PUBLIC}
            assert all(hasattr(found, part) for part in found.__all__), name
    rows = set(re.findall(r"^\| `([\w.]+)` \|", page, re.M))
    assert {row for row in rows if "." in row} == of_modules
    assert {name for name in verl_tasks.PUBLIC if f"`{name}`" not in page} == set()


def test_the_package_has_one_name_and_imports_nothing_until_it_is_asked():
    code = """import sys, verl_tasks
heavy = {"torch", "pandas", "numpy", "pyarrow", "jsonschema"}
assert not heavy & {*sys.modules}, heavy & {*sys.modules}
import tasks.common  # the old name"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert said == "ImportError: tasks.common: the package is verl_tasks: `import verl_tasks`"  # the old name


def test_every_plugin_is_loaded_by_another_file_or_named_where_verl_is_told_of_it():
    """A patch that nothing imports patches nothing. Comments and docstrings that name a file do not count."""
    plugins, texts = (
        COMMON / "verl_plugins",
        {file: file.read_text() for file in COMMON.rglob("*") if file.suffix in (".py", ".yaml", ".sh")},
    )
    for file in plugins.rglob("*.py"):
        *folders, name = file.relative_to(plugins).with_suffix("").parts
        folder = ".".join(["verl_plugins", *folders])
        imported = rf"from verl_tasks\.{folder} import [^\n]*\b{name}\b|import {name}\b"
        named = re.compile(rf"\b{folder}\.{name}\b|{imported}|[\"']{name}\.py[\"']")
        assert name == "__init__" or any(named.search(texts[other]) for other in texts if other != file), file
