"""What the benchmarks compute of a run's files."""

import json
import os
import subprocess
import sys

import pandas as pd
import pytest

from tasks.common.settings import Command, load_settings
from tests.benchmarks import fresh_prompts
from tests.helpers import ROOT, exported


def rows(**scores) -> str:
    """Rollouts as verl dumps them: the scores (float32) of each prompt."""
    lines = [
        {"input": f"system\nCount.\nuser\n{prompt}\nassistant\n", "output": "text", "score": score}
        for prompt, given in scores.items()
        for score in given
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "rollouts").mkdir()
    steps = {
        1: rows(a=[1.0, 0.30000001192092896], shown=[1.0, 1.0]),
        2: rows(a=[1.0, 1.0], b=[0.0, 0.1]),  # a again
        3: rows(c=[1.0, 0.0], d=[1.0, 1.0]),
        10: rows(e=[1.0, 1.0], f=[0.3, 1.0], ab=[1.0, 1.0]),
    }
    for step, text in steps.items():
        (tmp_path / f"rollouts/{step}.jsonl").write_text(text)
    message = [{"role": "system", "content": "Count."}, {"role": "user", "content": "shown"}]
    pd.DataFrame({"messages": [message]}).to_parquet(tmp_path / "sft.parquet")
    return tmp_path


def test_pass_1_is_of_prompts_that_were_not_seen_before(run_dir, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    given = [str(run_dir), "--without", str(run_dir / "sft.parquet"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["fresh_prompts.py", *given])
    fresh_prompts.main()
    result = json.loads(out.read_text())
    assert list(result) == ["1", "2", "3", "10", "1 to 10"]
    assert [found["prompts"] for found in result.values()] == [1, 1, 2, 3, 7]
    assert [found["responses"] for found in result.values()] == [2, 2, 4, 6, 14]
    means = [found["pass@1"]["value"] for found in result.values()]
    assert means == pytest.approx([0.5, 0.0, 0.75, 5 / 6, 4.5 / 7])
    last = result["1 to 10"]["pass@1"]
    assert 0 < last["low"] < last["value"] < last["high"] <= 1
    assert "3: 2 prompts, 0.750 [0.500, 1.000]" in capsys.readouterr().out


def test_demonstrations_count_where_they_are_not_named(run_dir):
    assert fresh_prompts.figures([right for _, right in fresh_prompts.by_step(run_dir / "rollouts")])["prompts"] == 8


ON_A_GPU = ROOT / "tests/benchmarks/on_a_gpu.sh"


def on_a_gpu(tmp_path, *runs: str) -> subprocess.CompletedProcess:
    """The script with a make that writes down how it was called."""
    fake = tmp_path / "make"
    writes = f"open('{tmp_path}/calls', 'a').write(json.dumps(sys.argv[1:]) + chr(10))"
    fake.write_text(f"#!/usr/bin/env python3\nimport json, sys\n{writes}\n")
    fake.chmod(0o755)
    environment = os.environ | {"MAKE": str(fake), "STACK": "a100", "ARTIFACTS": str(tmp_path)}
    return subprocess.run(["bash", ON_A_GPU, *runs], env=environment, capture_output=True, text=True)


def test_the_runs_on_a_gpu_have_settings_that_are_taken(tmp_path):
    result = on_a_gpu(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert {target for target, *_ in calls} == {
        "all",
        "train",
        "dpo",
        "probe",
        "batch",
        "chat",
        "simulate",
        "experiment",
        "bench_training",
    }
    for target, *variables in calls:
        given = dict(text.split("=", 1) for text in variables)  # the last counts, as make has it
        task = given.pop("TASK")
        given["STAGE"] = "train" if target == "bench_training" else target
        environment = exported(ROOT / "tasks" / task / "train.sh", given)
        s, _ = load_settings(environment), load_settings(environment, cls=Command)
        assert task == s.TASK and s.STACK == "a100"


def test_a_run_on_a_gpu_that_there_is_not_is_refused(tmp_path):
    result = on_a_gpu(tmp_path, "learn", "nosuch")
    assert result.returncode == 2 and result.stderr.startswith("error: nosuch: no such run; there are: learn gspo")
    assert not (tmp_path / "calls").exists()
