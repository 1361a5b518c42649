"""`make clean` removes what it is told to, where ARTIFACTS is, and nothing else."""

import fcntl
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, make, outside_make
from verl_tasks.runs import clean

OTHERS = ("thesis.txt", "other/countdown/x")  # not of this repository


@pytest.fixture
def artifacts(tmp_path) -> Path:
    """A folder with something of two tasks, of what they share, and of somebody else."""
    folder = tmp_path / "a place"
    written = [f"{name}/{task}/x" for name in clean.OF_A_TASK for task in ("countdown", "gsm8k")]
    for name in (*written, "models/m/config.json", "judge/cache", "install.log", *OTHERS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_of_one_task_its_own_folders_are_removed_and_named(artifacts, monkeypatch, capsys):
    (artifacts / "trackio").mkdir()
    for name in ("countdown.db", "countdown.lock", "countdown_2.db"):
        (artifacts / "trackio" / name).touch()
    before = files(artifacts)
    result = make("clean", TASK="countdown", ARTIFACTS=str(artifacts))
    own = [*(f"{name}/countdown" for name in clean.OF_A_TASK), "trackio/countdown.db", "trackio/countdown.lock"]
    assert result.returncode == 0 and result.stdout.splitlines() == [f"removed {artifacts / name}" for name in own]
    assert files(artifacts) == {name for name in before if not name.startswith(tuple(own))}
    monkeypatch.setenv("ARTIFACTS", str(artifacts))
    clean.clean("countdown")
    assert capsys.readouterr().out == f"nothing of TASK=countdown in {artifacts}\n"


@pytest.mark.parametrize("yes", ["", "0", "yes"])
def test_without_a_task_or_a_yes_nothing_is_removed(artifacts, yes, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(artifacts))
    monkeypatch.setenv("YES", yes)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # no terminal
    before = files(artifacts)
    with pytest.raises(clean.SettingsError, match=r"^make clean removes reports, runs, .* or YES=1$"):
        clean.clean("")
    assert files(artifacts) == before


def test_with_a_yes_all_that_this_repository_wrote_is_removed(artifacts):
    command = [sys.executable, "-S", "-m", "verl_tasks.runs.clean"]  # -S: it needs no package
    own = outside_make() | {"ARTIFACTS": str(artifacts), "PYTHONPATH": str(ROOT), "YES": "1"}
    assert subprocess.run(command, cwd=ROOT, env=own).returncode == 0
    assert files(artifacts) == set(OTHERS)


@pytest.mark.parametrize(("answer", "removed"), [("y\n", True), ("\n", False), ("no\n", False)])
def test_on_a_terminal_it_asks(artifacts, answer, removed, monkeypatch, capsys):
    monkeypatch.setenv("ARTIFACTS", str(artifacts))
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    with os.fdopen(ours), os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        clean.clean("")
    said = capsys.readouterr().out
    assert str(artifacts / "runs") in said and ("nothing removed" in said) != removed
    assert (files(artifacts) == set(OTHERS)) == removed


@pytest.mark.parametrize("task", ["..", "../countdown", "/etc", "a b", "*"])
def test_a_task_is_a_name(artifacts, task, monkeypatch, capsys):
    monkeypatch.setenv("ARTIFACTS", str(artifacts))
    before = files(artifacts)
    with pytest.raises(clean.SettingsError, match="must be a plain name"):
        clean.clean(task)
    assert files(artifacts) == before


def test_of_a_link_the_link_is_removed_and_what_it_names_stays(artifacts, tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(artifacts))
    (artifacts / "runs").rename(tmp_path / "large disk")
    (artifacts / "runs").symlink_to(tmp_path / "large disk")
    monkeypatch.setenv("YES", "1")
    clean.clean("")
    assert files(artifacts) == set(OTHERS) and files(tmp_path / "large disk") == {"countdown/x", "gsm8k/x"}


@pytest.mark.parametrize("folder", ["runs/countdown", "rehearse/countdown/runs/countdown"])
@pytest.mark.parametrize("task", ["countdown", ""])
def test_a_task_that_runs_or_is_rehearsed_is_left_alone(artifacts, task, folder, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(artifacts))
    monkeypatch.setenv("YES", "1")
    (artifacts / folder).mkdir(parents=True, exist_ok=True)
    with (artifacts / folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = files(artifacts)
        with pytest.raises(clean.SettingsError, match=r"^TASK=countdown: is running .*end it before make clean$"):
            clean.clean(task)
        assert files(artifacts) == before
        clean.clean("gsm8k")
        assert not (artifacts / "runs/gsm8k").exists()


def test_every_folder_that_the_code_writes_is_known():
    texts = [path.read_text() for path in ROOT.glob("tasks/**/*.py") if not path.name.startswith("test_")]
    written = {name for text in texts for name in re.findall(r'artifacts\(\)(?:\.resolve\(\))? / f?"([a-z.]+)', text)}
    assert written > {"data", "runs", "models", "judge"} and written <= {*clean.OF_A_TASK, *clean.SHARED}
