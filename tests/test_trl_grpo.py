"""The benchmark of TRL's GRPOTrainer: its own program, vLLM in its process, on a very small random model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.common.rows import rl_row, rl_schema, write_parquet
from tasks.common.settings import stack
from tests.benchmarks import training
from tests.helpers import ROOT, SMALL

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
