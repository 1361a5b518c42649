"""SFT, and DPO on the policy's own samples: real steps on a very small random model, all weights and LoRA."""

import json
import math
from pathlib import Path

import pytest

from tasks.common.runs.folder import recorded
from tests.helpers import kill_after_a_checkpoint, make
from tests.small_runs import COMMON, TASK, check_run, metrics_of, runs_of, trained_parameters

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def variables(digits_checkout, small_model, tmp_path_factory):
    """Settings of a training, and the folder of its Makefile."""
    artifacts = tmp_path_factory.mktemp("methods") / "artifacts"
    return COMMON | {"cwd": digits_checkout, "MODEL": str(small_model), "ARTIFACTS": str(artifacts)}


@pytest.mark.parametrize("rank", [0, pytest.param(8, marks=pytest.mark.long)])
def test_two_steps_of_dpo_on_the_policys_own_samples(variables, rank):
    result = make("dpo", **variables, LORA_RANK=str(rank))
    assert result.returncode == 0, result.stdout
    assert "DPO 2/2" in result.stdout
    run = check_run(variables, "dpo", rank)
    assert metrics_of(run)[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-3)  # policy and reference are equal


@pytest.mark.long
def test_rounds_start_from_the_round_before(variables):
    """The first round is the LoRA run of the test above, whose merged weights the second starts from."""
    result = make("dpo", **variables, LORA_RANK="8", SELF_PLAY_ROUNDS="2")
    assert result.returncode == 0, result.stdout
    assert "up to date: 2 steps" not in result.stdout.split("round 2 of 2")[1]
    assert "round 1 of 2" in result.stdout
    assert all(f" {name} " in result.stdout for name in ("round1", "round2"))  # columns of the table
    (second,) = (run for run in runs_of(variables, "dpo") if run.name.endswith("-round2"))
    start = json.loads((second / "settings.json").read_text())["start"]
    (first,) = (run for run in runs_of(variables, "dpo") if start == f"{run}/checkpoints/global_step_2/merged")
    assert metrics_of(second)[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-3)  # the reference is new
    assert (second / "pairs.parquet").read_bytes() != (first / "pairs.parquet").read_bytes()


def test_sft_on_accepted_samples_says_when_none_is_accepted(variables):
    """A random model is never right: rejection sampling leaves nothing, and says what to do."""
    result = make("sft", **{**variables, "INIT": "sft", "SFT_SOURCE": "samples"})
    errors = [line for line in result.stdout.splitlines() if line.startswith("error:")]
    assert result.returncode != 0 and len(errors) == 1, result.stdout
    assert not list((Path(variables["ARTIFACTS"]) / "runs" / TASK).glob("sft-*/checkpoints"))


@pytest.mark.long
def test_a_warm_up_that_was_killed_goes_on_from_its_checkpoint(variables):
    chosen = variables | {"INIT": "sft", "SFT_STEPS": "30"}
    saved = kill_after_a_checkpoint("sft", f"runs/{TASK}/sft-*", **chosen)
    result = make("sft", **chosen)
    assert result.returncode == 0, result.stdout
    (run,) = runs_of(variables, "sft")
    launches = [file.read_text().splitlines() for file in sorted((run / "metrics").glob("*.jsonl"))]
    first, second = ([json.loads(line)["step"] for line in lines] for lines in launches)
    assert first[0] == 1 and saved < 30 and second == list(range(saved + 1, 31))


def test_sft_with_lora_exports_its_adapter(variables):
    result = make("sft", **{**variables, "INIT": "sft", "LORA_RANK": "8"})
    assert result.returncode == 0, result.stdout
    (run,) = (run for run in runs_of(variables, "sft") if recorded(run)["settings"]["LORA_RANK"])
    changed = trained_parameters(variables, run)
    assert changed and all("_proj" in name for name in changed)
    assert (run / "checkpoints/global_step_2/merged/lora_adapter/adapter_config.json").is_file()
