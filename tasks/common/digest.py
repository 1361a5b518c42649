"""Digests of values, files and code: what names a run, and tells that its inputs changed."""

import ast
import functools
import hashlib
import json
import re
from pathlib import Path

from verl_tasks import PUBLIC
from verl_tasks.places import PACKAGE, ROOT

FILE = re.compile(r"[\w-]{1,80}(\.[\w-]{1,20}){1,3}")  # a file's name
NAME = re.compile(r"[^\W\d]\w{0,80}(\.[^\W\d]\w{0,80}){0,9}")  # a module's
LOADERS = {"importlib", "runpy", "__import__"}  # load code by a name


def fingerprint(values: dict, *files: Path) -> str:
    """Eight hex digits of a digest of ``values`` and of the contents of ``files``."""
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=4)
    for file in files:
        digest.update(_digest(file))
    return digest.hexdigest()


@functools.cache
def _digest(file: Path) -> bytes:
    """Computed once per process: editing a file during a run must not change the run's name."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


@functools.cache
def code_digest(program: Path) -> str:
    """Digest of the code of ``program``, without comments and docstrings, of what it imports, and of the files beside
    it that it names.

    Of this package only the rooms data and rewards count; the others do not change data or rewards.
    """
    digest, seen, left = hashlib.sha256(), set(), [program]
    while left:
        file = left.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        if file.suffix != ".py":
            digest.update(_digest(file))
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # the error comes where it is run
            digest.update(file.read_bytes())
            continue
        for node in ast.walk(tree):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if documented and ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
        left += sorted(imported(tree, file), reverse=True)
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()


def imported(tree: ast.AST, file: Path) -> set[Path]:
    """The files of tasks, of the rooms data and rewards, and of rows and ends, that a syntax tree imports; those beside
    it too that it names: a table that it reads, a program (program.environment_of). Of a task that loads code by a
    name that it may make, all code in its folder but tests."""
    names, common = set(), tuple(f"verl_tasks.{name}" for name in ("data.", "rewards.", "rows", "ends"))
    places: set[tuple[Path, str]] = set()  # of relative imports: a folder, and a module's name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "verl_tasks":
            names |= {f"verl_tasks.{PUBLIC.get(alias.name, alias.name)}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = [node.module] if node.module else []
            made = {".".join([*module, *more]) for more in ([], *([alias.name] for alias in node.names))}
            if node.level:
                places |= {(file.parents[min(node.level, len(file.parents)) - 1], name) for name in made}
            else:
                names |= made
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    files = {PACKAGE / f"{name.partition('.')[2].replace('.', '/')}.py" for name in names if name.startswith(common)}
    if PACKAGE not in file.parents:  # a program imports its neighbours by their names alone
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        files |= {file.with_name(name) for name in filter(FILE.fullmatch, texts)}
        called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if LOADERS & {*called, *(name.partition(".")[0] for name in names)}:
            files |= {each for each in file.parent.rglob("[!.]*.py") if not each.name.startswith("test_")}
            names |= texts
        places |= {(file.parent, name) for name in names if NAME.fullmatch(name)}
        places |= {(ROOT, name) for name in names if name.startswith("tasks.") and NAME.fullmatch(name)}
    for folder, name in places:
        module = folder / name.replace(".", "/")
        files |= {module / "__init__.py", module.with_name(f"{module.name}.py")} if name else set()
    return {each for each in files if each.is_file()}
