"""The template: every way in, every combination of answers, bad names."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, cookiecutter

QUESTIONS = json.loads((ROOT / "template/cookiecutter.json").read_text())
CHOICES = {name: values for name, values in QUESTIONS.items() if isinstance(values, list)}
COMBINATIONS = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
FILES = {
    "README.md",
    "answers.json",
    "evaluate.py",
    "examples.jsonl",
    "prepare_data.py",
    "reward.py",
    "test_reward.py",
    "train.sh",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A git clone of the working tree, as a user has it."""
    source, clone = tmp_path_factory.mktemp("source") / "tasks.git", tmp_path_factory.mktemp("clone") / "verl tasks"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).exists() or (ROOT / name).is_symlink(), files):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=source, check=True)
    subprocess.run(["git", "clone", "-q", source, clone], check=True)
    return clone


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if ".git/" not in f"{path}/"}


def git_url(checkout: Path) -> str:
    return f"git+file://{checkout}"


def ways_in(checkout: Path) -> dict[str, list[str]]:
    return {
        "cookiecutter .": ["."],
        "cookiecutter template -o tasks": ["template", "-o", "tasks"],
        "cookiecutter GIT_URL": [git_url(checkout)],
        "cookiecutter GIT_URL -o tasks": [git_url(checkout), "-o", "tasks"],
        "cookiecutter GIT_URL --directory template": [git_url(checkout), "--directory", "template"],
    }


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """cookiecutter keeps clones and replays in the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("way", ways_in(Path()))
def test_every_way_in_scaffolds_under_tasks(way, checkout, own_home):
    result = cookiecutter(*ways_in(checkout)[way], "--no-input", "task=fresh", cwd=checkout)
    home = checkout / "tasks/fresh"
    try:
        assert result.returncode == 0, result.stdout
        assert tree(home) == FILES
        assert "make train TASK=fresh" in result.stdout
        assert not (checkout / "fresh").exists()
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.parametrize("way", ways_in(Path()))
@pytest.mark.parametrize("name", ["a/b", "../evil", "Bad-Name", "class", "9lives", "naïve", "a" * 41, "{{7*7}}", "a b"])
def test_bad_name_gets_one_line_and_leaves_nothing(way, name, checkout, own_home):
    before = tree(checkout.parent)
    result = cookiecutter(*ways_in(checkout)[way], "--no-input", f"task={name}", cwd=checkout)
    assert result.returncode != 0
    assert [line for line in result.stdout.splitlines() if line and line != "Aborted!"][-1:] == [
        line for line in result.stdout.splitlines() if line.startswith("error: task ")
    ]
    assert "Traceback" not in result.stdout
    assert tree(checkout.parent) == before


def test_an_existing_task_is_kept(checkout, own_home):
    before = (checkout / "tasks/countdown/reward.py").read_bytes()
    for way in ("cookiecutter .", "cookiecutter template -o tasks"):
        result = cookiecutter(*ways_in(checkout)[way], "--no-input", "task=countdown", cwd=checkout)
        assert result.returncode != 0
        assert "countdown" in result.stdout
    assert (checkout / "tasks/countdown/reward.py").read_bytes() == before
    assert not (checkout / "countdown").exists()


def test_outside_a_checkout_the_next_commands_lead_into_one(checkout, own_home, tmp_path):
    result = cookiecutter(git_url(checkout), "--no-input", "task=far", cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert tree(tmp_path / "far") == FILES
    command = next(line for line in result.stdout.splitlines() if "git clone" in line).partition("#")[0]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "verl-tasks/tasks/far/train.sh").is_file()


@pytest.mark.parametrize("answers", COMBINATIONS, ids=lambda answers: "-".join(answers.values()))
def test_every_combination_renders_lints_and_passes_its_own_tests(answers, checkout, own_home):
    name = "combo_" + "_".join(answers.values())
    options = [f"{key}={value}" for key, value in answers.items()]
    result = cookiecutter("template", "-o", "tasks", "--no-input", f"task={name}", *options, cwd=checkout)
    assert result.returncode == 0, result.stdout
    home = checkout / "tasks" / name
    assert tree(home) == FILES
    for file in FILES:
        assert not re.search(r"\{\{|\{%|cookiecutter\.", (home / file).read_text()), f"{file} has stray Jinja"
    assert json.loads((home / "answers.json").read_text())["cookiecutter"].items() >= answers.items()
    tools = Path(sys.executable).parent
    for command in (
        [tools / "ruff", "check", home],
        [tools / "ruff", "format", "--check", home],
        [tools / "shellcheck", "-x", home / "train.sh"],
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", home],
    ):
        done = subprocess.run(command, cwd=checkout, env=environment(checkout), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def environment(checkout: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(checkout), "HOME": str(checkout)}


def test_rendering_again_from_the_answers_gives_the_same_task(checkout, own_home):
    cookiecutter("template", "-o", "tasks", "--no-input", "task=again", "reward=exact", "lora=yes", cwd=checkout)
    home = checkout / "tasks/again"
    before = {file: (home / file).read_bytes() for file in FILES}
    replay = ["template", "-o", "tasks", "-f", "--replay-file", str(home / "answers.json")]
    result = cookiecutter(*replay, cwd=checkout)
    assert result.returncode == 0, result.stdout
    assert {file: (home / file).read_bytes() for file in FILES} == before


def test_countdown_has_the_files_of_the_template():
    names = {path.name for path in (ROOT / "tasks/countdown").iterdir() if path.is_file()}
    assert names == FILES
