"""TAB in a real bash and zsh, by the code of `verl-tasks completion`."""

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT, outside_make

WITH_ZSH = pytest.param("zsh", marks=pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed"))
SHELLS = pytest.mark.parametrize("shell", ["bash", WITH_ZSH])


def completed(shell: str, folder: Path, home: Path, *typed: str, before: str = "") -> list[str]:
    """Each line of ``typed`` after its TABs, as ``shell`` has it in ``folder``; ``before`` runs at its start."""
    home.mkdir()
    said = home / "said"
    command = home / "bin/verl-tasks"  # what a wheel installs
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec python3 -P -m verl_tasks.launch.cli "$@"\n')
    command.chmod(0o755)
    (home / f".{shell}rc").write_text(f"{before}\nPS1='> '\neval \"$(verl-tasks completion {shell})\"\n")
    start = {"bash": ["bash", "--noprofile", "--rcfile", home / ".bashrc", "-i"], "zsh": ["zsh", "-d", "-i"]}[shell]
    path = f"{command.parent}:{os.environ['PATH']}"
    environment = outside_make() | {"HOME": str(home), "ZDOTDIR": str(home), "TERM": "dumb", "PATH": path}
    environment.pop("PYTHONPATH", None)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        start, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    # To the start of the line, and to its end: what stands there is said, not run.
    for line in (*(f"{keys}\x01echo '\x05' >>{said}" for keys in typed), "exit"):
        os.write(ours, f"{line}\r".encode())
    screen = b""
    try:
        while part := os.read(ours, 65536):
            screen += part
    except OSError:  # the shell has ended
        os.close(ours)
    assert process.wait() == 0 and said.exists(), screen.decode()
    return said.read_text().splitlines()


@SHELLS
def test_targets_tasks_and_variables_are_completed_after_make_and_after_our_command(shell, tmp_path):
    typed = {
        "make rehe\t": "make rehearse ",
        "make train TASK=countd\t": "make train TASK=countdown ",
        "make train TASK=countdown TEMPERA\t1": "make train TASK=countdown TEMPERATURE=1",
        "verl-tasks rehe\t": "verl-tasks rehearse ",
        "verl-tasks train TASK=countd\t": "verl-tasks train TASK=countdown ",
        "verl-tasks train TEMPERA\t1": "verl-tasks train TEMPERATURE=1",
        "make json_to_parquet FILE=pyproj\t": "make json_to_parquet FILE=pyproject.toml ",
    }
    found = completed(shell, ROOT, tmp_path / "home", *typed)
    assert [line.rstrip() for line in found] == [line.rstrip() for line in typed.values()]


@SHELLS
def test_a_project_completes_its_own_tasks_by_its_own_version(shell, tmp_path):
    project = tmp_path / "my project"
    (project / "tasks/sums").mkdir(parents=True)
    (project / "tasks/sums/train.sh").touch()
    shutil.copytree(ROOT / "tasks/common", project / ".verl-tasks/verl_tasks", ignore=lambda *_: {"__pycache__"})
    stages = project / ".verl-tasks/verl_tasks/stages.py"
    stages.write_text(stages.read_text().replace('    "rehearse": ', '    "other": '))
    typed = ("make train TASK=su\t", "make othe\t", "verl-tasks othe\t")
    found = completed(shell, project, tmp_path / "home", *typed)
    assert [line.rstrip() for line in found] == ["make train TASK=sums", "make other", "verl-tasks other"]


@SHELLS
def test_make_elsewhere_is_completed_as_before(shell, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "Makefile").write_text("goal_of_theirs:\n\ttrue\n")
    before = {
        "bash": "_completion_loader() { theirs() { COMPREPLY=(goal_of_theirs); }; complete -F theirs make; }",
        "zsh": "",
    }[shell]
    typed = ("make goal_\t", "verl-tasks rehe\t", "make goal_\t")
    found = completed(shell, other, tmp_path / "home", *typed, before=before)
    assert [line.rstrip() for line in found] == ["make goal_of_theirs", "verl-tasks rehearse", "make goal_of_theirs"]
