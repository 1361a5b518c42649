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
    """The files of the task, of the rooms data and rewards, and of rows and ends, that a syntax tree imports; those
    beside it too that it names: a table that it reads, a program (program.environment_of)."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "verl_tasks":
            names |= {f"verl_tasks.{PUBLIC.get(alias.name, alias.name)}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    common = tuple(f"verl_tasks.{name}" for name in ("data.", "rewards.", "rows", "ends"))
    files = {PACKAGE / f"{name.partition('.')[2].replace('.', '/')}.py" for name in names if name.startswith(common)}
    task = f"tasks.{file.parent.name}."
    files |= {ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith(task)}
    if PACKAGE not in file.parents:  # a program imports its neighbours by their names alone
        beside = {f"{name}.py" for name in names if name.isidentifier()}
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        beside |= set(filter(FILE.fullmatch, texts))
        files |= {file.with_name(name) for name in beside}
    return {each for each in files if each.is_file()}
