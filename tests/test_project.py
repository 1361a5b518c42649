"""A project of a user: written by cookiecutter in an empty folder, with the library from a wheel, and no clone.

The wheels are built from the working tree: as it is, and, since no earlier tag has the package, once more as another
version with changes that an upgrade may have.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import verl_tasks
from tests.helpers import PYTHON, SMALL, cookiecutter, copy_of_checkout, outside_make

NEXT = "99.0"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """A folder with both wheels."""
    folder = tmp_path_factory.mktemp("wheels")
    now = copy_of_checkout(tmp_path_factory.mktemp("now"))
    later = copy_of_checkout(tmp_path_factory.mktemp("later"))
    changed = {
        "__init__.py": (f'__version__ = "{verl_tasks.__version__}"', f'__version__ = "{NEXT}"'),
        "settings.py": ('    SEED: int = variable("42"', '    SEED: int = variable("43"'),
        "rewards/expression.py": ("MAX_DIGITS = 9", "MAX_DIGITS = 8"),
        "rewards/answers.py": ("\n\n\ndef ", "\n\n\n# another comment\ndef "),
    }
    for name, (old, new) in changed.items():
        text = (later / "tasks/common" / name).read_text()
        assert old in text
        (later / "tasks/common" / name).write_text(text.replace(old, new, 1))
    for source in (now, later):
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
        subprocess.run(build, check=True, env=os.environ | {"PIP_NO_INDEX": "1"})
    assert len(list(folder.iterdir())) == 2
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch, wheels) -> Path:
    """An empty folder after `cookiecutter URL`, with a pin that needs no network."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # cookiecutter keeps clones and replays there
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    folder = tmp_path / "my project"
    folder.mkdir()
    source = copy_of_checkout(tmp_path / "source")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"], ["tag", "v1"]):
        subprocess.run([*git, *command], cwd=source, check=True)
    written = cookiecutter(f"git+file://{source}", "--no-input", "task=sums", "model=embedded", cwd=folder)
    assert written.returncode == 0 and "make train TASK=sums" in written.stdout, written.stdout
    assert f'"verl-tasks @ git+file://{source}@v1",' in (folder / "pyproject.toml").read_text()
    shutil.rmtree(source)
    pin_to(verl_tasks.__version__, folder)
    return folder


def pin_to(version: str, folder: Path) -> None:
    file = folder / "pyproject.toml"
    file.write_text(re.sub('"verl-tasks.*"', f'"verl-tasks=={version}"', file.read_text()))


def make(folder: Path, *arguments: str, **variables: str) -> str:
    command = ["make", f"PYTHON={PYTHON}", *arguments, *(f"{name}={value}" for name, value in variables.items())]
    done = subprocess.run(command, cwd=folder, env=outside_make(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.medium
def test_a_project_is_small_and_has_the_targets_of_a_clone(project):
    files = [path for path in project.rglob("*") if path.is_file()]
    lines = [len(path.read_text().splitlines()) for path in files]
    assert len(files) <= 14 and sum(lines) < 500 and len((project / "Makefile").read_text().splitlines()) <= 40
    assert "rehearse" in make(project, "help") and "lint" not in make(project, "help")
    assert re.search("^MODEL +embedded +train.sh, cpu", make(project, "settings", TASK="sums", STACK="cpu"), re.M)
    make(project, "new", TASK="second")
    assert (project / "tasks/second/reward.py").is_file()
    assert "passed" in make(project, "test", TASK="second")
    sizes = {"TRAIN_SIZE": "8", "TEST_SIZE": "8", "DEV_SIZE": "8", "SFT_SIZE": "8", "TRAIN_BATCH_SIZE": "8"}
    said = make(project, "data", TASK="second", STACK="cpu", GOLD="error", SFT_BATCH_SIZE="8", **sizes)
    assert "24 of 24" in said or "demonstrations" in said
    assert (project / "artifacts/data/second/train.parquet").is_file()
    refused = subprocess.run(["make", "train", "TASK=sum"], cwd=project, capture_output=True, text=True)
    assert "TASK=sum: no such task; there are: second sums" in refused.stderr


@pytest.mark.medium
def test_the_librarys_source_can_be_changed_in_the_project(project):
    make(project, "vendor")
    file = project / "verl_tasks/settings.py"
    file.write_text(file.read_text().replace('    SEED: int = variable("42"', '    SEED: int = variable("7"'))
    assert re.search("^SEED +7 +default", make(project, "settings", TASK="sums", STACK="cpu"), re.M)


@pytest.mark.medium
def test_the_command_does_what_make_does(wheels, project, tmp_path):
    (project / "Makefile").unlink()
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    install = [environment / "bin/pip", "install", "-q", f"verl-tasks=={verl_tasks.__version__}"]
    subprocess.run(install, check=True)

    def said(*arguments: str) -> subprocess.CompletedProcess:
        command = [environment / "bin/verl-tasks", *arguments]
        return subprocess.run(command, cwd=project, env=outside_make(), capture_output=True, text=True)

    shown = said("settings", "TASK=sums", "STACK=cpu", f"PYTHON={PYTHON}", "LR=1e-3")
    assert re.search("^LR +1e-3 +command line", shown.stdout, re.M), shown.stderr
    assert "LRR: no such variable; did you mean LR?" in said("settings", "TASK=sums", "LRR=1").stderr
    assert "STACK=nope: no such stack; there are: a100 cpu current" in said("install", "nope").stderr
    assert said("completion", "fish").stderr == "error: completion fish: must be one of bash, zsh\n"
    assert {"train", "TASK=sums", "LR="} <= set(said("words").stdout.splitlines())


@pytest.mark.slow
def test_a_project_of_the_version_before_still_trains_and_doctor_says_what_changed(project, small_model):
    small = SMALL | {"MODEL": str(small_model), "TASK": "sums", "INIT": "base", "STEPS": "2"}
    make(project, "train", **small)
    assert f"library: {verl_tasks.__version__}, with the variables" in make(project, "doctor", **small)
    pin_to(NEXT, project)
    said = make(project, "doctor", **small)
    assert f"library: {NEXT} differs from {verl_tasks.__version__}, which trained" in said
    assert "SEED is 43, was 42" in said and "rewards/expression.py differs" in said
    assert "rewards/answers.py" not in said  # a comment
    make(project, "train", **small)
    assert len(list((project / "artifacts/runs/sums").glob("grpo-*"))) == 2
