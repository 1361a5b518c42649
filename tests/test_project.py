"""A project of a user: written by cookiecutter in an empty folder, with the library as a package, and no clone.

The library is the working tree: as the template pins it, by a tag, and once more as a wheel of another version with
changes that an upgrade may have.
TAB completes its command in a real bash and zsh.
"""

import os
import pty
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import verl_tasks
from tests.helpers import PYTHON, ROOT, SMALL, cookiecutter, copy_of_checkout, outside_make

NEXT = "99.0"
# What an upgrade may change.
CHANGED = {
    "__init__.py": (f'__version__ = "{verl_tasks.__version__}"', f'__version__ = "{NEXT}"'),
    "settings.py": ('    SEED: int = variable("42"', '    SEED: int = variable("43"'),
    "rewards/expression.py": ("MAX_DIGITS = 9", "MAX_DIGITS = 8"),
    "rewards/answers.py": ("\n\n\ndef ", "\n\n\n# another comment\ndef "),
    "stages.py": ('"sft", "train", "eval")', '"sft", "train")'),  # the evaluation is a third of the time
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Iterator[Path]:
    """An empty folder after `cookiecutter URL` and the first `make`, which installs the pinned library."""
    source, wheels = copy_of_checkout(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheels")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"], ["tag", "v1"]):
        subprocess.run([*git, *command], cwd=source, check=True)
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # cookiecutter keeps clones and replays there
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(wheels))
        patch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip's word for: without it, by the setuptools that is here
        patch.delenv("PYTHONPATH", raising=False)
        answered = cookiecutter(f"git+file://{source}", "--no-input", "task=sums", "model=embedded", cwd=folder)
        assert answered.returncode == 0 and "make train TASK=sums" in answered.stdout, answered.stdout
        assert f'"verl-tasks @ git+file://{source}@v1",' in (folder / "pyproject.toml").read_text()
        with pytest.MonkeyPatch.context() as own:
            own.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            assert "make TARGET" in make(folder, "help")
        for name, (old, new) in CHANGED.items():
            text = (source / "tasks/common" / name).read_text()
            assert old in text
            (source / "tasks/common" / name).write_text(text.replace(old, new, 1))
        wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, source]
        subprocess.run(wheel, check=True)
        shutil.rmtree(source)
        yield folder


@pytest.fixture
def project(tmp_path, written) -> Path:
    """A copy of it, in a folder with a space."""
    return Path(shutil.copytree(written, tmp_path / "my project"))


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
    files = [path for path in project.rglob("*") if path.is_file() and ".verl-tasks" not in path.parts]
    lines = [len(path.read_text().splitlines()) for path in files]
    assert len(files) <= 14 and sum(lines) < 500 and len((project / "Makefile").read_text().splitlines()) <= 40
    assert "rehearse" in make(project, "help") and "lint" not in make(project, "help")
    assert re.search("^MODEL +embedded +train.sh, cpu", make(project, "settings", TASK="sums", STACK="cpu"), re.M)
    make(project, "new", TASK="second")
    assert (project / "tasks/second/reward.py").is_file()
    refused = subprocess.run(["make", "train", "TASK=sum"], cwd=project, capture_output=True, text=True)
    assert "TASK=sum: no such task; there are: second sums" in refused.stderr


@pytest.mark.medium
def test_a_pin_is_any_line_that_pip_takes_and_without_one_an_error_says_so(project):
    file = project / "pyproject.toml"
    text = file.read_text()
    file.write_text(re.sub('"verl-tasks.*",', f'"verl-tasks>={NEXT}"', text))
    make(project, "help")
    assert f'"{NEXT}"' in (project / ".verl-tasks/verl_tasks/__init__.py").read_text()
    file.write_text(re.sub('.*"verl-tasks.*",\n', "", text))
    refused = subprocess.run(["make", "help"], cwd=project, env=outside_make(), capture_output=True, text=True)
    assert refused.returncode and 'error: pyproject.toml: needs a line "verl-tasks==VERSION"' in refused.stderr
    assert (project / ".verl-tasks/verl_tasks").is_dir()


@pytest.mark.medium
def test_the_steps_of_its_ci_file_run(project):
    """In order and by bash -e, as a runner does, but for the two actions that fetch the project and a Python. Both are
    here, so `make install` finds nothing to install, and needs no network."""
    (job,) = yaml.safe_load((project / ".github/workflows/test.yml").read_text())["jobs"].values()
    actions = {step["uses"].partition("@")[0]: step.get("with") for step in job["steps"] if "uses" in step}
    assert actions.keys() == {"actions/checkout", "actions/setup-python"}
    needed = tomllib.loads((project / "pyproject.toml").read_text())["project"]["requires-python"]
    assert actions["actions/setup-python"]["python-version"] in SpecifierSet(needed)
    sizes = {"TRAIN_SIZE": "8", "TEST_SIZE": "8", "DEV_SIZE": "8", "SFT_SIZE": "8", "TRAIN_BATCH_SIZE": "8"}
    environment = outside_make() | {"PYTHON": PYTHON, "STACK": "cpu", "SFT_BATCH_SIZE": "8"} | sizes

    def run(step: dict) -> subprocess.CompletedProcess:
        command = ["bash", "-e", "-c", step["run"]]
        return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)

    make(project, "new", TASK="second")
    done = [run(step) for step in job["steps"] if "run" in step]
    assert not any(step.returncode for step in done), [step.stdout + step.stderr for step in done]
    for task in ("second", "sums"):
        assert (project / "artifacts/data" / task / "train.parquet").is_file()
    assert done[-1].stdout.count(" passed") == done[-1].stdout.count("gold check: 24 of 24") == 2
    data = project / "tasks/second/prepare_data.py"  # the first of two
    assert '#### {a + b}")' in data.read_text()
    data.write_text(data.read_text().replace('#### {a + b}")', '#### {a + b}", f"#### {a + a % 2 + b}")'))
    ended = run(job["steps"][-1])
    assert ended.returncode != 0 and "demonstrations get acc 1" in ended.stdout + ended.stderr, ended.stderr


@pytest.mark.medium
def test_the_librarys_source_can_be_changed_in_the_project(project):
    make(project, "vendor")
    file = project / "verl_tasks/settings.py"
    file.write_text(file.read_text().replace('    SEED: int = variable("42"', '    SEED: int = variable("7"'))
    assert re.search("^SEED +7 +default", make(project, "settings", TASK="sums", STACK="cpu"), re.M)


@pytest.mark.medium
def test_the_command_does_what_make_does(project, tmp_path):
    (project / "Makefile").unlink()
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    install = [sys.executable, "-m", "pip", "--python", environment, "install", "-q"]
    subprocess.run([*install, f"verl-tasks=={NEXT}"], check=True)

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
def test_a_training_goes_on_after_an_upgrade_and_doctor_says_what_changed(project, small_model):
    small = SMALL | {"MODEL": str(small_model), "TASK": "sums", "STEPS": "1"}
    make(project, "sft", **small)
    assert f"library: {verl_tasks.__version__}, with the variables" in make(project, "doctor", **small)
    pin_to(NEXT, project)
    said = make(project, "doctor", **small)
    assert f"library: {NEXT} differs from {verl_tasks.__version__}, which trained" in said
    assert "SEED is 43, was 42" in said and "rewards/expression.py differs" in said
    assert "rewards/answers.py" not in said  # a comment
    make(project, "train", **small, SEED="42")  # doctor's advice: the warm-up of the version before stays
    runs = (project / "artifacts/runs/sums").glob("*/settings.json")
    assert sorted(file.parent.name.partition("-")[0] for file in runs) == ["grpo", "sft"]


# ---- by the code of `verl-tasks completion`


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
