"""The benchmarks' scripts: what they run is taken."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tests import recipes, results
from tests.benchmarks import many_gpus, training
from tests.helpers import ROOT, SMALL, exported, outside_make, settings_of, until
from verl_tasks.machine.hardware import GPU, Nvidia
from verl_tasks.rows import rl_row, rl_schema, write_parquet
from verl_tasks.settings import SettingsError, stack

ON_A_GPU, MANY_GPUS = (ROOT / f"tests/benchmarks/{name}.sh" for name in ("on_a_gpu", "many_gpus"))


def with_fake_make(script, tmp_path, *runs: str, **variables: str) -> subprocess.CompletedProcess:
    """The script with a make that writes down how it was called."""
    fake = tmp_path / "make"
    writes = f"open('{tmp_path}/calls', 'a').write(json.dumps(sys.argv[1:]) + chr(10))"
    metrics = "os.makedirs(os.environ['ARTIFACTS'] + '/bench/now/ours/metrics', exist_ok=True)"
    metrics += "; open(os.environ['ARTIFACTS'] + '/bench/now/ours/metrics/000.jsonl', 'w')"
    fake.write_text(f"#!/usr/bin/env python3\nimport json, os, sys\n{writes}\n{metrics}\n")
    fake.chmod(0o755)
    (tmp_path / "curl").symlink_to("/bin/true")  # a served judge answers
    given = {"MAKE": str(fake), "STACK": "a100", "ARTIFACTS": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment = {name: value for name, value in os.environ.items() if name != "MODELS"} | given | variables
    return subprocess.run(["bash", script, *runs], env=environment, capture_output=True, text=True)


@pytest.fixture
def idle_python(tmp_path):
    """A Python that computes nothing."""
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    return str(tmp_path / "python")


@pytest.mark.medium
def test_the_runs_on_a_gpu_have_settings_that_are_taken(tmp_path, idle_python):
    result = with_fake_make(ON_A_GPU, tmp_path, PYTHON=idle_python, MODELS=str(tmp_path / "models"))
    assert result.returncode == 0, result.stdout + result.stderr
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    targets = {"all", "data", "train", "dpo", "probe", "batch", "chat", "simulate", "experiment", "bench_training"}
    assert {target for target, *_ in calls} == targets | {"doctor", "new"}
    assert all(settings_of(target, given).STACK == "a100" for target, *given in calls if target != "new")


def test_the_runs_on_several_gpus_have_settings_that_are_taken(tmp_path, idle_python):
    parts = ("engines", "dpo", "tp", "sp16k", "scale", "scale_7b", "lora_32b", "gsm8k")
    result = with_fake_make(MANY_GPUS, tmp_path, *parts, STACK="current", PYTHON=idle_python, GPUS="1 4")
    assert result.returncode == 0, result.stdout + result.stderr
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    targets = [target for target, *_ in calls]
    assert targets == ["data", "dpo", "dpo", "train", *["bench_training"] * 7, "all"]
    found = [settings_of(target, given) for target, *given in calls]
    assert all(s.STACK == "current" for s in found)
    tp, sp16k, *scale, scale_7b, lora_32b, gsm8k = found[3:]
    assert (tp.TP, tp.OFFLOAD, tp.N_GPUS, tp.STEPS) == (2, 1, 2, 2)
    assert (sp16k.SP, sp16k.N_GPUS, sp16k.MAX_RESPONSE_LENGTH) == (2, 2, 16384)
    sizes = [(s.N_GPUS, s.TRAIN_BATCH_SIZE * s.ROLLOUT_N) for s in scale]
    assert sizes == [(1, 1024), (1, 2048), (4, 1024), (4, 2048)]
    assert (scale_7b.N_GPUS, gsm8k.N_GPUS) == (4, 4) and (lora_32b.N_GPUS, lora_32b.TP, lora_32b.LORA_RANK) == (
        4,
        2,
        32,
    )


def test_a_part_on_several_gpus_that_fails_does_not_stop_the_others(tmp_path, idle_python):
    """`killed` fails too: the training ends before a rank is killed."""
    (tmp_path / "python").write_text("#!/bin/sh\necho error: none; exit 1\n")
    result = with_fake_make(MANY_GPUS, tmp_path, "sp", "killed", "gsm8k", STACK="current", PYTHON=idle_python)
    assert result.returncode == 1
    said = [line for line in result.stdout.splitlines() if "done" in line or "failed" in line]
    ended = [line.split(" after")[0].split(" in")[0] for line in said]
    assert ended == ["sp: failed", "killed: failed", "gsm8k: done"]
    assert "error: none" in said[0]


def test_the_efficiency_is_that_beside_the_fewest_gpus(tmp_path):
    for gpus, speed in ((2, 100.0), (4, 90.0)):
        figures = {"tokens_per_second_per_gpu": speed, "seconds_step": 8.0 / gpus, "seconds_in_all": 99.0}
        result = {"gpu": "H", "variants": {"ours": figures}}
        (tmp_path / f"scale_7b-{gpus}-1024.json").write_text(json.dumps(result))
    many_gpus.scale(str(tmp_path), "scale_7b", str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())["1024 rollouts"]
    assert found["efficiency"] == {"2": 1.0, "4": 0.9}
    assert found["phases"] == {"2": {"seconds_step": 4.0}, "4": {"seconds_step": 2.0}}


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("nosuch", "no such run; there are: learn gspo"),
        ("distill", "set MODELS to a folder with the models small and teacher\n"),
    ],
)
def test_a_run_on_a_gpu_that_cannot_be_made_is_refused(run, said, tmp_path):
    result = with_fake_make(ON_A_GPU, tmp_path, "learn", run)
    assert result.returncode == 2 and result.stderr.startswith(f"error: {run}: {said}")
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--variants", "ours,typo"], "--variants typo: there are: ours, example, naive, by_token, eager, trl"),
        (["--steps", "1"], "--steps 1: give 2 or more, the first is left out"),
    ],
)
def test_what_a_benchmark_cannot_take_is_refused(given, said, tmp_path, monkeypatch):
    environment = exported(ROOT / "tasks/countdown/train.sh", SMALL | {"ARTIFACTS": str(tmp_path)})
    monkeypatch.setattr(sys, "argv", ["training.py", *given])
    with pytest.raises(SettingsError, match=f"^{re.escape(said)}$"), mock.patch.dict(os.environ, environment):
        training.main()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("names", [["NVIDIA H200", "NVIDIA H200"], []])
def test_a_result_names_the_gpu(names, tmp_path, monkeypatch):
    gpus = tuple(GPU(name, 0, 0) for name in names)
    monkeypatch.setattr(many_gpus, "nvidia", lambda: Nvidia("1", "13", gpus) if names else None)
    many_gpus.write(tmp_path / "out.json", {"speedup": 1.9})
    found = json.loads((tmp_path / "out.json").read_text())
    assert found.get("gpu") == (names[0] if names else None)
    assert found["speedup"] == 1.9 and found["versions"]["torch"]


TRUTH = '{"numbers": [3, 4], "target": 7}'


def environment(folder: Path, **given: str) -> dict[str, str]:
    """Of a benchmark on the cpu stack, whose training prompts are in ``folder``."""
    environ = SMALL | {"ARTIFACTS": str(folder), "INIT": "base"} | given
    data = folder / "data/countdown"
    data.mkdir(parents=True)
    messages = [[{"role": "user", "content": f"{'x' * n} Make 7 of 3 and 4."}] for n in (*range(11), 300)]
    rows = [rl_row("countdown", each, TRUTH, "train", n) for n, each in enumerate(messages)]
    write_parquet(rows, data / "train.parquet", rl_schema())
    return os.environ | stack("cpu").ENVIRONMENT | environ | {"PYTHONPATH": str(ROOT)}


def with_more_tokens(model: Path, folder: Path) -> Path:
    """``model``'s tokenizer with random weights for twice its tokens, as the benchmark's 3B shape has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(model, folder)
    config = AutoConfig.from_pretrained(model)
    config.vocab_size *= 2
    AutoModelForCausalLM.from_config(config, dtype="bfloat16").save_pretrained(folder)
    return folder


@pytest.mark.long
def test_three_steps_have_figures_under_the_names_of_ours(small_model, tmp_path):
    folder, model = tmp_path / "trl", with_more_tokens(small_model, tmp_path / "model")
    program = [sys.executable, str(ROOT / "tests/benchmarks/training.py"), "--variants", "trl", "--steps", "3"]
    environ = environment(folder, MODEL=str(model))
    done = subprocess.run([*program, "--out", "out.json"], env=environ, cwd=folder, capture_output=True, text=True)
    logs = "".join(path.read_text()[-3000:] for path in folder.glob("bench/*/*/log"))
    assert done.returncode == 0, done.stderr[-2000:] + logs
    result = json.loads((folder / "out.json").read_text())
    figures = result["variants"]["trl"]
    wanted = {f"seconds_{phase}" for phase in training.PHASES} | {"tokens_per_second_per_gpu", "tokens", "score"}
    assert wanted <= figures.keys() and result["versions"]["trl"]
    phases = [figures[f"seconds_{phase}"] for phase in training.PHASES if phase != "step"]
    assert sum(phases) == pytest.approx(figures["seconds_step"], rel=0.2)  # medians, each of its own
    assert figures["seconds_old_log_prob"] > 0
    assert 16 <= figures["response_length"] <= 48 and figures["tokens"] > 16 * figures["response_length"]


# ---- make recipe: the recipes' commands and what they promise


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
        recipes.FILE.write_text(TABLE.replace(old, new).format(command))
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
