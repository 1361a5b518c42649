"""Validation, PATIENCE and the best checkpoint with real verl, vLLM and Ray on a very small random model."""

import json
from pathlib import Path

import pytest

from tasks.common.rows import read_rows
from tests.helpers import SMALL, make

pytestmark = pytest.mark.long


def test_validations_choose_the_checkpoint_and_end_the_training(small_model, tmp_path):
    """A random model has no reward: no validation is better than the first."""
    variables = SMALL | {"MODEL": str(small_model), "ARTIFACTS": str(tmp_path), "INIT": "base", "STEPS": "6"}
    variables |= {"SAVE_FREQ": "2", "TEST_FREQ": "1", "PATIENCE": "2", "LIMIT": "2", "N": "1"}
    result = make("train", **variables)
    assert result.returncode == 0, result.stdout
    assert "3 of 6 steps, ended by PATIENCE=2" in result.stdout
    assert "dev 0.000, best 0.000 (step 1)" in result.stdout
    (run_dir,) = (tmp_path / "runs/countdown").glob("grpo-*")
    kept = sorted(path.name for path in (run_dir / "checkpoints").glob("*global_step_*"))
    assert kept == ["global_step_1", "global_step_3"]
    assert f"{run_dir.name}-step1" in str(list((tmp_path / "eval/countdown").iterdir()))

    data = tmp_path / "data/countdown"
    asked = [json.loads(line)["input"] for line in (run_dir / "validation/2.jsonl").read_text().splitlines()]
    dev = [row["prompt"][-1]["content"] for row in read_rows(data / "dev.parquet")]
    assert len(asked) == len(dev) == 4 and all(any(prompt in text for text in asked) for prompt in dev)

    again = make("train", **variables)
    assert again.returncode == 0 and "up to date: 3 of 6 steps" in again.stdout, again.stdout
    merged = make("merge", **variables)
    assert "checkpoint of step 1, the best of its validations (STEP=latest: 3)" in merged.stdout
    assert Path(run_dir / "checkpoints/global_step_1/actor/huggingface/model.safetensors").is_file()
