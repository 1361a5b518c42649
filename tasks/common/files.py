"""Files: written beside and renamed, so that nothing half-written has a final name; JSON; digests."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` that becomes ``path`` at the end; on an error ``path`` stays as it was."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target`` that becomes ``target`` at the end; an error leaves nothing behind."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, value) -> None:
    """Replace ``path`` by ``value`` as indented JSON."""
    with written_beside(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict:
    """The JSON object in ``path``; empty if the file is missing, unreadable, or holds another JSON value."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def sha256(path: Path) -> str:
    """Hex digest of a file's contents."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
