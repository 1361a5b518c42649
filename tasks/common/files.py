"""Files: written under another name and then renamed, so that none is half-written; JSON; digests."""

import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: the disk is full, or the user's share of it

LONGEST_LINE = 2**20  # bytes


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _no_space(error: Exception) -> int:
    """The error number of NO_SPACE that caused ``error``, else 0. safetensors and torch raise classes of their own."""
    number = getattr(error, "errno", None)
    if number in NO_SPACE:
        return number
    return next((number for number in NO_SPACE if os.strerror(number) in str(error)), 0)


def _remove_abandoned(target: Path) -> None:
    """Remove the partial files of ``target`` that killed processes left: those that no process has locked."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises: it is locked, or no lock is possible
                _remove(path)
            finally:
                os.close(descriptor)


def _new_partial(target: Path, make: Callable[[Path], None]) -> tuple[Path, int]:
    """A new path beside ``target``, and a descriptor whose lock on it ends with this process."""
    while True:
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        make(partial)
        with suppress(FileNotFoundError):  # another process found it before it was locked, and removed it
            descriptor = os.open(partial, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if partial.exists():
                return partial, descriptor
            os.close(descriptor)


@contextmanager
def partial_of(target: Path, make: Callable[[Path], None] = Path.mkdir) -> Iterator[Path]:
    """Yield a new folder beside ``target``, or what ``make`` makes, of this process alone; it is removed at the end.

    So two processes can write the same target. The next one removes a killed process's leftovers. On a full disk
    the OSError names ``target``.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    partial, descriptor = _new_partial(target, make)
    try:
        yield partial
    except Exception as error:
        if (number := _no_space(error)) and not getattr(error, "filename", None):
            raise OSError(number, os.strerror(number), str(target)) from error
        raise
    finally:
        _remove(partial)
        os.close(descriptor)


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yield an empty file beside ``path`` that becomes ``path`` at the end; on an error ``path`` stays as it was."""
    path = Path(path)
    with partial_of(path, Path.touch) as partial:
        yield partial
        os.replace(partial, path)


@contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target`` that becomes ``target`` at the end; an error leaves nothing behind.

    If another process was first, with files of the same names, its folder stays. A link to nothing is replaced.
    """
    with partial_of(target) as partial:
        yield partial
        if target.is_symlink() and not target.exists():
            target.unlink(missing_ok=True)
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir() or not {f.name for f in partial.iterdir()} <= {f.name for f in target.iterdir()}:
                raise


def check_writable(path: Path) -> None:
    """Raise OSError unless a file can be written as ``path``. For checks before long work."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder")
    with partial_of(path, Path.touch) as partial:
        partial.write_bytes(b"0")  # a full disk still accepts an empty file


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in UTF-8; half a surrogate pair, which UTF-8 cannot hold, becomes ``?``."""
    with written_beside(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="replace")


def write_json(path: Path, value) -> None:
    """Replace ``path`` by ``value`` as indented JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def regular(path: Path) -> Path:
    """``path``. Raises OSError for a pipe or a device, as a run from elsewhere may have: reading it might never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return path


class NewLines:
    """The lines of a file that another process writes, each read once."""

    def __init__(self, file: Path):
        self.file, self.place, self.count, self.last = file, 0, 0, b""  # what was read: bytes, lines, the last line

    def read(self) -> Iterator[tuple[int, str]]:
        """Number and text of each line since the last call. An unfinished last line does not count; one of more than
        LONGEST_LINE comes in pieces. Where the file is not what was read, as it was cut or begun anew, all are new."""
        with suppress(FileNotFoundError), regular(self.file).open("rb") as file:
            file.seek(self.place - len(self.last))
            if file.read(len(self.last)) != self.last:
                self.place, self.count, self.last = file.seek(0), 0, b""
            while (line := file.readline(LONGEST_LINE)).endswith(b"\n") or len(line) == LONGEST_LINE:
                yield self.count + 1, line.decode(errors="replace")
                self.place, self.count, self.last = self.place + len(line), self.count + 1, line


def read_json(path: Path) -> dict:
    """The JSON object in ``path``; empty if the file is missing, is unreadable or holds something else."""
    try:
        value = json.loads(regular(path).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def sha256(path: Path) -> str:
    """Hex digest of a file's contents."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
