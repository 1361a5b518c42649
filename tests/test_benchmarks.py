"""The benchmarks' scripts: what they run is taken."""

import json
import os
import re
import subprocess
import sys
from unittest import mock

import pytest

from tasks.common.settings import SettingsError
from tests.benchmarks import training
from tests.helpers import ROOT, SMALL, exported, settings_of

ON_A_GPU, TWO_GPUS = (ROOT / f"tests/benchmarks/{name}.sh" for name in ("on_a_gpu", "two_gpus"))


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


def test_the_runs_on_two_gpus_have_settings_that_are_taken(tmp_path, idle_python):
    result = with_fake_make(TWO_GPUS, tmp_path, STACK="current", PYTHON=idle_python)
    assert result.returncode == 0, result.stdout + result.stderr
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    targets = [target for target, *_ in calls]
    assert targets == ["data", "dpo", "dpo", "train", *["bench_training"] * 5]
    found = [settings_of(target, given) for target, *given in calls]
    assert all(s.STACK == "current" for s in found)
    tp, sp16k, *scale = found[3:]
    assert (tp.TP, tp.OFFLOAD, tp.N_GPUS, tp.STEPS) == (2, 1, 2, 2)
    assert (sp16k.SP, sp16k.N_GPUS, sp16k.MAX_RESPONSE_LENGTH) == (2, 2, 16384)
    sizes = sorted((s.N_GPUS, s.TRAIN_BATCH_SIZE * s.ROLLOUT_N) for s in scale)
    assert sizes == [(1, 1024), (1, 2048), (2, 1024), (2, 2048)]


def test_a_part_on_two_gpus_that_fails_does_not_stop_the_others(tmp_path, idle_python):
    (tmp_path / "python").write_text("#!/bin/sh\necho error: none; exit 1\n")
    result = with_fake_make(TWO_GPUS, tmp_path, "sp", "scale2", "scale", STACK="current", PYTHON=idle_python)
    assert result.returncode == 1
    said = [line for line in result.stdout.splitlines() if "done" in line or "failed" in line]
    assert [line.split(" after")[0].split(" in")[0] for line in said] == ["sp: failed", "scale2: done", "scale: failed"]
    assert "error: none" in said[0]


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
        (["--variants", "ours,typo"], "--variants typo: there are: ours, example, naive, by_token, trl"),
        (["--steps", "1"], "--steps 1: give 2 or more, the first is left out"),
    ],
)
def test_what_a_benchmark_cannot_take_is_refused(given, said, tmp_path, monkeypatch):
    environment = exported(ROOT / "tasks/countdown/train.sh", SMALL | {"ARTIFACTS": str(tmp_path)})
    monkeypatch.setattr(sys, "argv", ["training.py", *given])
    with pytest.raises(SettingsError, match=f"^{re.escape(said)}$"), mock.patch.dict(os.environ, environment):
        training.main()
    assert not [*tmp_path.iterdir()]
