"""Whatever a variable holds is text to make, to the shell and to the template; a checkout's path may be any."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers import MAKE, PYTHON, ROOT, copy_of_checkout, make, outside_make

COUNTDOWN = {"TASK": "countdown", "STACK": "cpu"}
ODD = "a b'c%d \"$e,{f}"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("goal", "variables"),
    [
        ("data", {"TASK": "countdown || touch X; #"}),
        ("data", {"TASK": "countdown\ntouch X"}),
        ("data", {"TASK": "countdown gsm8k"}),
        ("data", {"TASK": "$(shell touch X)"}),
        ("settings", COUNTDOWN | {"STACK": "cpu; touch X"}),
        ("settings", COUNTDOWN | {"LR": "$(shell touch X)"}),
        ("settings", COUNTDOWN | {"ARGS": "'a; touch X"}),
        ("settings", COUNTDOWN | {"PYTHON": "no'; touch X; '"}),
        ("settings", COUNTDOWN | {"PYTHON": "python3'; touch X; '"}),
        ("test", {"TASK": "x'; touch X; '"}),
        ("json_to_parquet", {"FILE": "x'; touch X; '", "OUTPUT": "y"}),
        ("new", {"TASK": "{{ cycler.__init__.__globals__.os.system('touch X') }}"}),
        ("new", {"TASK": "{% set x = cycler.__init__.__globals__.os.system('touch X') %}"}),
        ("new", {"TASK": "x'; touch X; '"}),
        ("new", {"TASK": "Not-a-name"}),
        ("new", {"TASK": "x", "OPTIONS": "reward=exact; touch X"}),
        ("new", {"TASK": "x", "OPTIONS": "'reward=exact"}),
        ("new", {"TASK": "x", "OPTIONS": "turns=multi reward=math"}),
        ("new", {"TASK": "x", "OPTIONS": '"description={{ 7*7 }}"'}),
        ("new", {"TASK": "x", "SOURCE": "reasoning_gym", "ENV": "$(touch X)"}),
        ("new", {"TASK": "x", "SOURCE": "reasoning_gym", "ENV": "chain_sum", "CONFIG": "{{ 7*7 }}"}),
    ],
)
def test_a_value_runs_no_code_and_is_refused_in_one_line(goal, variables):
    before = set(os.listdir(ROOT)) | set(os.listdir(ROOT / "tasks"))
    result = make(goal, **variables)
    said = [line for line in result.stdout.splitlines() if line and not line.startswith("make: ***")]
    assert result.returncode != 0 and len(said) == 1, result.stdout
    assert set(os.listdir(ROOT)) | set(os.listdir(ROOT / "tasks")) == before


def test_make_runs_no_code_of_the_environment(tmp_path):
    run = f"$(shell touch {tmp_path}/X)"
    environment = outside_make() | dict.fromkeys(("CHOSEN", "FILE", "SLOW", "UPGRADE"), run)
    environment["PYTHON"] = f"python3'; touch {tmp_path}/X; '"
    for goal in ("help", "doctor", "lock", "test", "json_to_parquet"):
        subprocess.run(["make", "-n", goal, "TASK=countdown", "STACK=cpu"], cwd=ROOT, env=environment, check=True)
    assert not (tmp_path / "X").exists()


def test_clean_takes_a_python_of_any_path(tmp_path):
    (tmp_path / ODD).mkdir()
    (tmp_path / ODD / "python").write_text('#!/bin/sh\necho mine >&2; exec python3 "$@"\n')
    (tmp_path / ODD / "python").chmod(0o755)
    command = ["make", "clean", "TASK=countdown", f"ARTIFACTS={tmp_path}/none", f"PYTHON={tmp_path / ODD}/python"]
    result = subprocess.run(command, cwd=ROOT, env=outside_make(), capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == (f"nothing of TASK=countdown in {tmp_path}/none\n", "mine\n")


@pytest.mark.parametrize("way", ["command line", "environment"])
def test_a_value_reaches_a_stage_as_it_is(way):
    given = COUNTDOWN | {"MODEL": f"/{ODD} `touch X` $(touch X) $(shell touch X) #"}
    arguments = [f"{name}={value}" for name, value in given.items()] if way == "command line" else []
    environment = outside_make() | ({} if arguments else given)
    command = [*MAKE, "settings", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    (row,) = (line for line in result.stdout.splitlines() if line.startswith("MODEL "))
    assert given["MODEL"] in row and not (ROOT / "X").exists()


@pytest.mark.medium
def test_words_of_ARGS_are_the_shells_without_its_commands():
    arguments = "trainer.experiment_name='a b' +data.note=\"'$HOME; touch X * $(touch X)'\""
    result = make("config", **COUNTDOWN, INIT="base", MODEL="some/model", ARGS=arguments)
    assert result.returncode == 0, result.stdout
    assert "experiment_name: a b\n" in result.stdout and "note: $HOME; touch X * $(touch X)\n" in result.stdout
    assert not (ROOT / "X").exists()


@pytest.fixture(scope="module")
def odd_checkout(tmp_path_factory):
    folder = copy_of_checkout(tmp_path_factory.mktemp("checkout") / ODD)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    return folder


@pytest.mark.medium
@pytest.mark.parametrize("goal", ["help", "settings", "data", "config", "lint", "runs", "json_to_parquet"])
def test_a_goal_works_in_a_checkout_of_any_path(goal, odd_checkout, tmp_path):
    environment = odd_checkout / ".venv/bin"  # what make finds by itself, not PYTHON=
    environment.mkdir(parents=True, exist_ok=True)
    for name in ("python", "ruff", "shellcheck"):
        (environment / name).write_text(f'#!/bin/sh\nexec "{Path(PYTHON).parent / name}" "$@"\n')
        (environment / name).chmod(0o755)
    (odd_checkout / ".venv/.installed-cpu").touch()
    given = {} if goal in ("help", "lint", "runs", "json_to_parquet") else {"TASK": "countdown", "TRAIN_SIZE": "128"}
    if goal == "json_to_parquet":
        rows = [{"question": f"{number}?", "answer": str(number)} for number in range(40)]
        (tmp_path / f"{ODD}.json").write_text(json.dumps(rows))
        given = {"FILE": str(tmp_path / f"{ODD}.json"), "OUTPUT": str(tmp_path / f"{ODD} out"), "ARGS": "--test-size 4"}
    command = ["make", goal, "STACK=cpu", *(f"{name}={value}" for name, value in given.items())]
    result = subprocess.run(command, cwd=odd_checkout, env=outside_make(), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    if goal == "data":
        assert (odd_checkout / "artifacts/data/countdown/train.parquet").is_file()
    if goal == "json_to_parquet":
        assert (tmp_path / f"{ODD} out/train.parquet").is_file()


@pytest.mark.medium
def test_a_new_task_works_in_a_checkout_of_any_path(odd_checkout):
    assert make("new", TASK="fresh", cwd=odd_checkout).returncode == 0
    result = make("test", TASK="fresh", cwd=odd_checkout)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout
