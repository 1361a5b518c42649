"""`verl-tasks STAGE TASK=name NAME=value`: what make does, in a project or in a folder that becomes one.

`verl-tasks install cpu` is `make install STACK=cpu`.
"""

import os
import sys
from pathlib import Path

from verl_tasks.places import PACKAGE


def library() -> Path:
    """The folder of this package where the Makefile looks for it: the project's own, else a link to this one."""
    for path in (Path("verl_tasks"), Path(".verl-tasks/verl_tasks")):
        if path.is_dir():
            return path
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(PACKAGE)
    return path


def main() -> None:
    match sys.argv[1:]:
        case ["install", stack, *rest] if "=" not in stack:
            make(["install", f"STACK={stack}", *rest])
        case given:
            make(given)


def make(arguments: list[str]) -> None:
    """Run make in place of this process, by the Makefile of the project's library."""
    os.execvp("make", ["make", "-f", str(library() / "Makefile"), *arguments])


if __name__ == "__main__":
    main()
