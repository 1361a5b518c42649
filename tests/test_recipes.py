"""make recipe: the recipes' commands and what they promise."""

import json
import os
import signal
import subprocess
import threading

import psutil
import pytest

from tests import recipes, results
from tests.helpers import ROOT, outside_make, settings_of, until


def estimate(value: float, low: float, high: float) -> dict:
    return {"value": value, "low": low, "high": high}


PASS_1 = {
    "warm-up": estimate(0.3, 0.25, 0.35),
    "trained": estimate(0.5, 0.45, 0.55),
    "difference": estimate(0.2, 0.1, 0.3),
}
COMPARED = {"against": "warm-up", "metrics": {"pass@1": PASS_1}}
TABLE = """
[own]
about = "A result"
hardware = "any"
stack = "cpu"
minutes = 1
takes = []
promises = ["pass@1 gain above 0.05"]
command = '''{}'''
"""
LEAVES = f"""mkdir -p "$ARTIFACTS/compare/countdown/a--b"
echo '{json.dumps(COMPARED)}' >"$ARTIFACTS/compare/countdown/a--b/compare.json"
"""


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Run a recipe `own` as make does, with a part of its table replaced; returns its exit status or error."""
    monkeypatch.setattr(recipes, "FILE", tmp_path / "recipes.toml")
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.setenv("NAME", "own")
    for name in ("GIVEN", "STACK", "PYTHON"):
        monkeypatch.delenv(name, raising=False)

    def run(command: str = LEAVES, old: str = "", new: str = ""):
        recipes.FILE.write_text(TABLE.format(command).replace(old, new))
        try:
            recipes.main()
        except SystemExit as ended:
            return ended.code
        return 0

    return run


@pytest.mark.parametrize(
    ("command", "old", "new", "said"),
    [
        (LEAVES, "0.05", "0.09", 0),
        (LEAVES, "0.05", "0.1", "error: own missed: pass@1 gain above 0.1"),
        (LEAVES, "gain above 0.05", "start above 0.31", "error: own missed: pass@1 start above 0.31"),
        (LEAVES, "gain above 0.05", "above 0.51", "error: own missed: pass@1 above 0.51"),
        (LEAVES, "pass@1", "pass@9", "error: own missed: pass@9 gain above 0.05"),
        (LEAVES, "gain above", "gain over", "recipes.toml: pass@1 gain over 0.05: must be METRIC [gain|start] above"),
        ("exit 3", "", "", "error: own: exit status 3"),
        ("true", "", "", "error: own: it left 0 compare.json"),
        ("sleep 60", "minutes = 1", "minutes = 0.01", "error: own: exit status 124: longer than its 0.01 minutes"),
    ],
)
def test_a_recipe_says_whether_it_kept_its_promise(command, old, new, said, ran, tmp_path, capsys):
    status = ran(command, old, new)
    assert status == 0 if said == 0 else said in status
    assert capsys.readouterr().out.endswith("own kept its promise: pass@1 gain above 0.09\n") is (said == 0)
    if said == 0:
        result = json.loads((tmp_path / "artifacts/recipes/own-cpu/recipe.json").read_text())
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
        assert head.startswith(result["commit"].removesuffix("-dirty")) and result["compare"] == COMPARED
        assert result["versions"]["python"] and result["cpu"].startswith(f"{len(os.sched_getaffinity(0))} x ")


def test_what_an_earlier_run_left_is_gone(ran):
    assert ran() == 0 and "it left 0 compare.json" in ran("true")


def test_a_setting_of_the_shell_reaches_no_command_and_the_python_does(ran, tmp_path, monkeypatch):
    for name in ("LR", "STEPS", "SEEDS", "ARGS", "FILE", "HF_HOME", "PYTHON"):
        monkeypatch.setenv(name, "7")
    shows = f'echo "${{LR-}} ${{STEPS-}} ${{SEEDS-}} ${{ARGS-}} ${{FILE-}} $HF_HOME $PYTHON" >{tmp_path}/seen\n'
    assert ran(shows + LEAVES) == 0 and (tmp_path / "seen").read_text() == "     7 7\n"
    ran(shows + LEAVES, "takes = []", 'takes = ["FILE"]')
    assert (tmp_path / "seen").read_text() == "    7 7 7\n"


@pytest.mark.parametrize(
    ("given", "takes", "said"),
    [
        ("NAME STACK PYTHON ARTIFACTS", "", 0),
        ("NAME FILE", '"FILE"', 0),
        ("NAME FILE", "", "error: FILE: own has its own settings; it takes no variable"),
        ("STEPS NAME LR FILE", '"FILE"', "error: LR: own has its own settings; it takes FILE"),
    ],
)
def test_a_variable_of_makes_command_line_that_a_recipe_does_not_take(given, takes, said, ran, monkeypatch):
    monkeypatch.setenv("GIVEN", given)
    assert ran(LEAVES, "takes = []", f"takes = [{takes}]") == said


@pytest.mark.parametrize(
    ("mine", "wanted", "advised"),
    [("current", "cpu", "cpu"), ("cpu", "current", "current"), ("a100", "current", "a100")],
)
def test_a_recipe_of_another_stack_is_refused_unless_it_is_asked_for(mine, wanted, advised, ran, monkeypatch):
    monkeypatch.setenv("STACK", mine)
    table = LEAVES, '"cpu"', f'"{wanted}"'
    assert ran(*table) == f"error: NAME=own: is for any, STACK={wanted}: make recipe NAME=own STACK={advised}"
    monkeypatch.setenv("GIVEN", "STACK")
    assert ran(*table) == 0


@pytest.mark.medium
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_recipe_that_is_ended_ends_its_command(number, ran, tmp_path):
    pid = tmp_path / "pid"
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def end() -> None:
        until(lambda: pid.exists() and pid.read_text().endswith("\n"))
        until(lambda: signal.getsignal(number) != before[number])  # else the tests end
        os.kill(os.getpid(), number)

    threading.Thread(target=end).start()
    try:
        assert ran(f"echo $$ >{pid}; sleep 60") == "error: own: interrupted"
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    until(lambda: not psutil.pid_exists(int(pid.read_text())))


@pytest.mark.parametrize("name", recipes.recipes())
def test_the_settings_of_a_recipe_are_taken(name, tmp_path):
    known = recipes.recipes()[name]
    (tmp_path / "make").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "make").chmod(0o755)
    given = {"MODEL": "/my model"} if "MODEL" in known.takes else {}
    path = outside_make() | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    models = []
    for environment in (path, path | given):
        command = ["bash", "-euo", "pipefail", "-c", known.command]
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        target, *variables = shown.splitlines()
        s = settings_of(target, [f"STACK={known.stack}", *variables])
        assert target == "all" and known.stack == s.STACK
        models.append(s.MODEL)
    assert models[1] == given.get("MODEL", models[0])
    if given:  # real weights, by hub id; its size stands in what the list says
        assert models[0].startswith("Qwen/Qwen2.5-Coder-") and models[0].split("-")[2] in known.about


def test_the_list_says_what_each_promises_and_what_it_came_to(monkeypatch, capsys):
    monkeypatch.delenv("NAME", raising=False)
    recipes.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("cpu-countdown: GRPO on countdown")]
    assert "  promises pass@1 gain above 0, accuracy gain above 0" in lines
    assert sum(": kept in " in line for line in lines) == len(results.recipes()) > 9
    monkeypatch.setenv("NAME", "none")
    with pytest.raises(SystemExit, match="NAME=none: no such recipe; there are: cpu-"):
        recipes.main()
