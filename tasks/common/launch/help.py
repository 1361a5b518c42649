"""`make help`: the targets of the Makefile, the stages, and every variable.

Runs before the installation, so it uses only Python's own library.
"""

import ast
import re
from dataclasses import fields

from verl_tasks.places import PACKAGE, ROOT
from verl_tasks.settings import Command, Settings, shown_default
from verl_tasks.stages import STAGES, own_stages
from verl_tasks.text import show

MAKEFILES = (PACKAGE / "Makefile", ROOT / "Makefile")


def targets() -> dict[str, dict[str, str]]:
    """The help of each target, by its group: those of the Makefiles, then the stages."""
    groups, group = {}, ""
    for line in [line for path in MAKEFILES if path.is_file() for line in path.read_text().splitlines()]:
        if line.startswith("##@ "):
            group = line.removeprefix("##@ ")
            groups[group] = {}
        elif target := re.fullmatch(r"([a-z_-]+): ## (.+)", line):
            groups[group][target[1]] = target[2]
    for name, stage in STAGES.items():
        if stage.group in groups:  # not those of a clone in a project
            groups[stage.group][name] = stage.help
    groups["Of one task"] = {}
    for file in sorted(ROOT.glob("tasks/*/train.sh")):
        for name in own_stages(file.parent):
            said = ast.get_docstring(ast.parse((file.parent / f"{name}.py").read_text())) or ""
            groups["Of one task"][name] = f"{file.parent.name}: {said.partition(chr(10))[0]}"
    return groups


def variables(cls: type) -> list[str]:
    """One line for each variable of ``cls``: name, shared default, help."""
    return [f"  {f.name:<24}{shown_default(f):<28}{f.metadata['help']}" for f in fields(cls) if f.name != "STAGE"]


def text() -> str:
    """All of it."""
    tasks = "|".join(sorted(file.parent.name for file in ROOT.glob("tasks/*/train.sh")))
    lines = [f'make TARGET TASK=<{tasks}> [VARIABLE=value ...] [ARGS="hydra.key=value ..."]']
    for group, of_group in targets().items():
        lines += ["", group, *(f"  {name:<16}{said}" for name, said in of_group.items())]
    lines += ["", "Variables with their defaults. A task, a stack and a method have their own: make settings TASK=..."]
    return "\n".join([*lines, *variables(Settings), "", "Variables of single commands:", *variables(Command)])


if __name__ == "__main__":
    show(text())
