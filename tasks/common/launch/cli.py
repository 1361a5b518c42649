"""`verl-tasks STAGE TASK=name NAME=value`: what make does, in a project or in a folder that becomes one.

`verl-tasks install cpu` is `make install STACK=cpu`. `verl-tasks completion bash` (or zsh) prints the shell's code.
"""

import os
import sys
from pathlib import Path

from verl_tasks.launch import help, names
from verl_tasks.places import PACKAGE, ROOT
from verl_tasks.settings import Command, Settings

# Words come from the library that the project uses, so of its version. In other folders make is completed as before.
COMPLETION = {
    "bash": """_verl_tasks_words() {
  if [[ -d verl_tasks || -d .verl-tasks ]]; then PYTHONPATH=.:.verl-tasks python3 -m verl_tasks.launch.cli words
  elif [[ $1 != make ]]; then verl-tasks words
  else return 1
  fi 2>/dev/null
}
_verl_tasks() {
  local all before each typed=${COMP_LINE:0:COMP_POINT}
  typed=${typed##* }
  COMPREPLY=()
  if ! all=$(_verl_tasks_words "$1"); then # another's make
    complete -r make
    { _comp_load make || _completion_loader make; } &>/dev/null # of bash-completion
    before=$(complete -p make 2>/dev/null | sed -n 's/.* -F \\([^ ]*\\) .*/\\1/p')
    complete -o default -F _verl_tasks make
    [[ -z $before ]] || "$before" "$@"
    return
  fi
  [[ $COMP_WORDBREAKS != *=* || $typed != *=* ]] || before=${typed%%=*}= # bash completes what is behind the =
  while read -r each; do
    [[ $each != "$typed"* ]] || COMPREPLY+=("${each#"$before"}")
  done <<<"$all"
  [[ ${#COMPREPLY[@]} != 1 || $COMPREPLY != *= ]] || compopt -o nospace
}
complete -o default -F _verl_tasks make verl-tasks
""",
    "zsh": """_verl_tasks() {
  local -a all
  if [[ -d verl_tasks || -d .verl-tasks ]]; then
    all=(${(f)"$(PYTHONPATH=.:.verl-tasks python3 -m verl_tasks.launch.cli words 2>/dev/null)"})
  elif [[ $service != make ]]; then
    all=(${(f)"$(verl-tasks words 2>/dev/null)"})
  else
    _make
    return
  fi
  compadd -S '' -- ${(M)all:#*=}
  compadd -- ${all:#*=}
  (( compstate[nmatches] )) || { compset -P '*='; _files }
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _verl_tasks make verl-tasks
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


if __name__ == "__main__":
    main()
