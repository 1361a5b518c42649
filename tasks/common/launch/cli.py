"""`verl-tasks STAGE TASK=name NAME=value`: what make does, in a project or in a folder that becomes one.

`verl-tasks install cpu` is `make install STACK=cpu`. `verl-tasks completion bash` (or zsh) prints the shell's code.
"""

import os
import sys
from pathlib import Path

from verl_tasks.launch import help, names
from verl_tasks.places import PACKAGE, ROOT
from verl_tasks.settings import Command, Settings

COMPLETION = {
    "bash": """_verl_tasks() {
  local line=${COMP_LINE:0:COMP_POINT} IFS=$'\\n'
  local word=${line##* }
  COMPREPLY=($(compgen -W "$(verl-tasks words)" -- "$word"))
  [[ $word != *=* ]] || COMPREPLY=("${COMPREPLY[@]#*=}") # bash takes what is before = for another word
  [[ ${COMPREPLY[*]} != *= ]] || compopt -o nospace
}
complete -F _verl_tasks verl-tasks
""",
    "zsh": """_verl_tasks() { compadd -S '' -- ${(f)"$(verl-tasks words)"} }
compdef _verl_tasks verl-tasks
""",
}


def library() -> Path:
    """The folder of this package where the Makefile looks for it: the project's own, else a link to this one."""
    for path in (Path("verl_tasks"), Path(".verl-tasks/verl_tasks")):
        if path.is_dir():
            return path
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(PACKAGE)
    return path


def words() -> list[str]:
    """What may follow `verl-tasks`: targets, tasks, and variables with their =."""
    variables = {*Settings.__dataclass_fields__, *Command.__dataclass_fields__, *names.MAKES} - {"STAGE", "TASK"}
    tasks = sorted(f"TASK={path.parent.name}" for path in ROOT.glob("tasks/*/train.sh"))
    return [
        *(target for group in help.targets().values() for target in group),
        *tasks,
        *(f"{v}=" for v in sorted(variables)),
    ]


def main() -> None:
    match sys.argv[1:]:
        case ["words"]:
            print("\n".join(words()))
        case ["completion", shell] if shell in COMPLETION:
            print(COMPLETION[shell], end="")
        case ["completion", *other]:
            sys.exit(f"error: completion {' '.join(other)}: must be one of {', '.join(COMPLETION)}")
        case ["install", stack, *rest] if "=" not in stack:
            make(["install", f"STACK={stack}", *rest])
        case given:
            make(given)


def make(arguments: list[str]) -> None:
    """Run make in place of this process, by the Makefile of the project's library."""
    os.execvp("make", ["make", "-f", str(library() / "Makefile"), *arguments])
