"""`make clean`: remove the files of runs under ARTIFACTS, of TASK only or, after a question, of every task.

Removes only files that this repository writes: ARTIFACTS may hold others too. Runs before the installation, so it uses
only Python's own library.
"""

import fcntl
import os
import re
import shutil
import sys
from pathlib import Path

from verl_tasks.settings import SettingsError, artifacts
from verl_tasks.stages import STAGES

# Folders with a folder for each task: those of the stages, and of `make report`.
OF_A_TASK = ("reports", *(folder for stage in STAGES.values() for folder in stage.writes))
SHARED = ("models", "parity", "verifiers", "judge", "programs", "monitor", "trackio", "site", "install.log")


def folders(task: str) -> list[Path]:
    """The existing folders of ``task``; empty: of every task, with models and shared files. Raises SettingsError."""
    if task and not re.fullmatch(r"(?!\.)[A-Za-z0-9._-]{1,64}", task):
        raise SettingsError(f"TASK={task[:80]}: must be a plain name")
    names = [f"{name}/{task}" for name in OF_A_TASK] if task else [*OF_A_TASK, *SHARED]
    found = [path for name in names if (path := artifacts() / name).exists() or path.is_symlink()]
    return [*found, *(sorted((artifacts() / "trackio").glob(f"{task}.*")) if task else ())]  # TASK.db, TASK.lock


def check_idle(task: str) -> None:
    """Raise SettingsError while a command of ``task`` (empty: of any) runs: it holds a lock (launch/main.py).

    A rehearsal's commands have ARTIFACTS in its folder.
    """
    of_task, rehearsed = f"runs/{task or '*'}/.lock", f"rehearse/{task or '*'}/runs/*/.lock"
    for lock in sorted([*artifacts().glob(of_task), *artifacts().glob(rehearsed)]):
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                running = f"TASK={lock.parent.name}: is running (process {file.read().strip()})"
                raise SettingsError(f"{running}; end it before make clean") from None


def remove(path: Path) -> None:
    """Remove a folder, a file, or a link (not its target)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def agreed(paths: list[Path]) -> bool:
    """Whether YES=1 is given, or the user at the terminal says yes. Raises SettingsError without a terminal."""
    if os.environ.get("YES") == "1":
        return True
    if not sys.stdin.isatty():
        what = f"removes {', '.join(path.name for path in paths)} of every task in {artifacts()}"
        raise SettingsError(f"make clean {what}; give TASK=name for one task, or YES=1")
    print("\n".join(str(path) for path in paths))
    return input("Remove all of it, of every task? [y/N] ").strip().lower() in ("y", "yes")


def clean(task: str) -> None:
    """Remove the folders of ``task``, or of every task, and print each path. Raises SettingsError."""
    if not (paths := folders(task)):
        print(f"nothing of {f'TASK={task}' if task else 'any task'} in {artifacts()}")
        return
    check_idle(task)
    if not task and not agreed(paths):
        print("nothing removed")
        return
    for path in paths:
        remove(path)
        print(f"removed {path}")


if __name__ == "__main__":
    try:
        clean(os.environ.get("TASK", ""))
    except (SettingsError, OSError) as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, EOFError):
        sys.exit(130)
