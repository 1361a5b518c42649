"""SFT, and DPO on the policy's own samples: real steps on a very small random model, all weights and LoRA."""

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.helpers import make
from tests.small_runs import COMMON, TASK, check_run, metrics_of, runs_of, trained_parameters
from verl_tasks.runs.run import recorded

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
    run = check_run(variables, "dpo", rank)
    pairs = pq.read_metadata(run / "pairs.parquet").num_rows
    steps = recorded(run)["settings"]["STEPS"]
    assert f"DPO {steps}/{steps}" in result.stdout and f": {steps} steps of 4 in DPO_EPOCHS=1" in result.stdout
    assert (pairs - pairs // 10) // 4 - 1 <= steps <= pairs // 4  # some may be left out
    assert metrics_of(run)[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-3)  # policy and reference are equal


@pytest.mark.long
def test_rounds_start_from_the_round_before(variables):
    """The first round is the LoRA run of the test above, whose adapter the second starts from."""
    result = make("dpo", **variables, LORA_RANK="8", SELF_PLAY_ROUNDS="2")
    assert result.returncode == 0, result.stdout
    assert "up to date" not in result.stdout.split("round 2 of 2")[1]
    assert "round 1 of 2" in result.stdout
    assert all(f" {name} " in result.stdout for name in ("round1", "round2"))  # columns of the table
    (second,) = (run for run in runs_of(variables, "dpo") if run.name.endswith("-round2"))
    start = json.loads((second / "settings.json").read_text())["start"]
    (first,) = (run for run in runs_of(variables, "dpo") if Path(start).is_relative_to(run))
    assert Path(start).name.startswith("global_step_")  # its adapter, which the second goes on with
    assert metrics_of(second)[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-3)  # the reference is new
    assert (second / "pairs.parquet").read_bytes() != (first / "pairs.parquet").read_bytes()


@pytest.mark.long  # test_own_samples.py says it of another engine
def test_sft_on_accepted_samples_says_when_none_is_accepted(variables):
    """A random model is never right: rejection sampling leaves nothing, and says what to do."""
    result = make("sft", **{**variables, "INIT": "sft", "SFT_SOURCE": "samples"})
    errors = [line for line in result.stdout.splitlines() if line.startswith("error:")]
    assert result.returncode != 0 and len(errors) == 1, result.stdout
    assert not list((Path(variables["ARTIFACTS"]) / "runs" / TASK).glob("sft-*/checkpoints"))


LORA = {"INIT": "sft", "LORA_RANK": "8", "SFT_STEPS": "20", "SFT_LOSS": "9999"}


@pytest.mark.long
def test_sft_with_lora_ends_by_its_loss_and_exports_its_adapter(variables):
    result = make("sft", **{**variables, **LORA})
    assert result.returncode == 0 and "below SFT_LOSS=9999" in result.stdout, result.stdout
    (run,) = (run for run in runs_of(variables, "sft") if recorded(run)["settings"]["LORA_RANK"])
    changed = trained_parameters(variables, run)
    assert changed and all("_proj" in name for name in changed)
    assert (run / "checkpoints/global_step_4/adapter/adapter_config.json").is_file()


@pytest.mark.long
def test_rl_goes_on_with_the_adapter_of_the_warm_up(variables):
    """The warm-up is that of the test above. Nothing is merged on the way, and all of it is evaluated."""
    from safetensors.torch import load_file

    result = make("train", **{**variables, **LORA, "KL_COEF": "0"})
    assert result.returncode == 0, result.stdout
    assert all(f" {name} " in result.stdout for name in ("base", "sft", "grpo"))  # columns of the table
    run = runs_of(variables, "grpo")[-1]
    adapter = Path(recorded(run)["start"])
    assert adapter.name == "adapter" and recorded(run)["base"] == variables["MODEL"]
    model = yaml.safe_load((run / "launches/000/config.yaml").read_text())["actor_rollout_ref"]["model"]
    assert (model["path"], model["lora_adapter_path"]) == (variables["MODEL"], str(adapter))
    before, after = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (adapter, run / "checkpoints/global_step_2/actor/adapter")
    )
    assert before.keys() == after.keys()
    moved = [float((after[name] - before[name]).norm() / before[name].norm()) for name in before if "lora_A" in name]
    assert 0 < max(moved) < 0.1  # a new adapter would have other numbers altogether
    assert not list(run.glob("checkpoints/**/merged"))
