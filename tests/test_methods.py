"""Methods, two real steps each on a very small random model: RL with LoRA and its comparison; SFT, and DPO on the
policy's own samples.

All weights are trained with grpo, gspo and egpo in test_numerics.py; ppo is in test_reward_model.py, with LoRA;
test_end_to_end.py resumes and evaluates grpo.
"""

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.helpers import error_line, make
from tests.small_runs import COMMON, TASK, check_run, metrics_of, runs_of, trained_parameters
from verl_tasks.runs.run import recorded
from verl_tasks.settings import OF_RL

pytestmark = pytest.mark.slow

RL = ("grpo", "gspo", "egpo")


@pytest.fixture(scope="module")
def variables(digits_checkout, small_model, tmp_path_factory):
    """Settings of a training, and the folder of its Makefile."""
    artifacts = tmp_path_factory.mktemp("methods") / "artifacts"
    return COMMON | {"cwd": digits_checkout, "MODEL": str(small_model), "ARTIFACTS": str(artifacts)}


def check_metrics(variables, method: str) -> None:
    """Of the LoRA run of ``method``: finite losses, a checkpoint that loads and differs, and what its terms show."""
    metrics = metrics_of(check_run(variables, method, 8))[2]
    assert metrics["critic/score/max"] > metrics["critic/score/min"]
    assert metrics["actor/kl_loss"] != 0  # the metric that shows that KL_COEF acts (docs/METHODS.md)
    assert ("egpo/term" in metrics) == (method == "egpo")


@pytest.mark.long
def test_the_experiment_trains_each_method_with_the_same_settings_and_compares_them(variables):
    result = make("experiment", **variables, METHODS="grpo,gspo,egpo", LORA_RANK="8")
    assert result.returncode == 0, result.stdout
    for method in RL:
        assert f"{method.upper()} 2/2" in result.stdout
        check_metrics(variables, method)
    (file,) = Path(variables["ARTIFACTS"]).glob(f"experiments/{TASK}/start-grpo-gspo-egpo-*/experiment.json")
    labels = [f"{method}@0.0001#42" for method in RL]  # the rate of LoRA
    found = json.loads(file.read_text())
    pairs = ["grpo - start", "gspo - start", "egpo - start", "gspo - grpo", "egpo - grpo"]
    assert list(found["differences"]) == pairs
    assert all({"value", "low", "high"} <= found["differences"][pair]["score"].keys() for pair in pairs)
    assert {name: figures["steps"] for name, figures in found["training"].items()} == dict.fromkeys(labels, 2)
    assert not {"METHOD", "LR", "TRAIN_SEED"} & found["settings"].keys()
    assert found["settings"]["MINI_BATCH_SIZE"] == 2
    assert file.with_suffix(".md").read_text().count("|") > 50


@pytest.mark.long  # after the experiment
def test_the_rollouts_have_the_rewards_of_the_tasks_own_function(variables):
    """Those of the LoRA GRPO run of the experiment, whose adapter alone is evaluated as well."""
    run = runs_of(variables, "grpo")[-1]
    rows = [json.loads(line) for line in (run / "rollouts/1.jsonl").read_text().splitlines()]
    scores = [row["score"] for row in rows]
    assert scores == pytest.approx([sum(c in "0123456789" for c in row["output"]) / 10 for row in rows])
    assert len(rows) == 16 and len(set(scores)) > 1
    adapter = run / "checkpoints/global_step_2/actor/adapter"
    merged = adapter.with_name("merged")  # the experiment's, which evaluates several models in one engine
    made = merged.stat().st_mtime_ns
    evaluated = make("eval", **{**variables, "MODEL": str(adapter), "BASE": variables["MODEL"], "LIMIT": "2"})
    assert evaluated.returncode == 0, evaluated.stdout
    assert "adapter-" in evaluated.stdout and merged.stat().st_mtime_ns == made


@pytest.mark.long  # after the experiment
def test_all_runs_every_stage_and_from_leaves_out_the_first(variables):
    chosen = variables | {"METHOD": "grpo", "LORA_RANK": "8"}
    result = make("all", **chosen, FROM="train")
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("skipped (FROM=train)") == 2 and "[6/6] compare" in result.stdout
    assert "prompts gained" in result.stdout
    refused = make("all", **{**chosen, "TRAIN_SIZE": "63"}, FROM="train")
    assert refused.returncode != 0 and "error: FROM=train: " in refused.stdout
    assert "was made with other settings" in refused.stdout


@pytest.mark.long
def test_two_seeds_of_two_methods_two_at_a_time(variables):
    changes = {"METHODS": "dr_grpo,reinforce_pp", "SEEDS": "2", "JOBS": "2", "STEPS": "1"}
    result = make("experiment", **{**variables, **changes})
    assert result.returncode == 0, result.stdout
    assert "4 trainings, 2 at a time" in result.stdout
    (file,) = Path(variables["ARTIFACTS"]).glob(f"experiments/{TASK}/start-dr_grpo-reinforce_pp-*/experiment.json")
    found = json.loads(file.read_text())
    labels = [f"{method}@1e-05#{seed}" for method in ("dr_grpo", "reinforce_pp") for seed in (42, 43)]  # by arm
    assert list(found["training"]) == labels
    assert found["differences"]["reinforce_pp - dr_grpo"]["score"]["test"] == "t, 2 seeds x 8 prompts"
    records = [json.loads((run / "launches/000/launch.json").read_text()) for run in runs_of(variables, "dr_grpo")]
    assert {(each["settings"]["SEED"], each["settings"]["TRAIN_SEED"]) for each in records} == {(42, 42), (42, 43)}
    # Another order of prompts, and other samples, of the same data.
    first, second = (
        [json.loads(line) for line in (run / "rollouts/1.jsonl").read_text().splitlines()]
        for run in runs_of(variables, "dr_grpo")
    )
    assert {row["input"] for row in first} != {row["input"] for row in second}


@pytest.fixture(scope="module")
def others(variables, tmp_path_factory):
    """The same beside other runs."""
    read = {name: value for name, value in variables.items() if name not in OF_RL}
    return read | {"ARTIFACTS": str(tmp_path_factory.mktemp("others") / "artifacts")}


@pytest.mark.parametrize("rank", [0, pytest.param(8, marks=pytest.mark.long)])
def test_two_steps_of_dpo_on_the_policys_own_samples(others, rank):
    result = make("dpo", **others, LORA_RANK=str(rank))
    assert result.returncode == 0, result.stdout
    run = check_run(others, "dpo", rank)
    pairs = pq.read_metadata(run / "pairs.parquet").num_rows
    steps = recorded(run)["settings"]["STEPS"]
    assert f"DPO {steps}/{steps}" in result.stdout and f": {steps} steps of 4 in DPO_EPOCHS=1" in result.stdout
    assert (pairs - pairs // 10) // 4 - 1 <= steps <= pairs // 4  # some may be left out
    assert metrics_of(run)[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-3)  # policy and reference are equal


@pytest.mark.long
def test_rounds_start_from_the_round_before(others):
    """The first round is the LoRA run of the test above, whose adapter the second starts from."""
    result = make("dpo", **others, LORA_RANK="8", SELF_PLAY_ROUNDS="2")
    assert result.returncode == 0, result.stdout
    assert "up to date" not in result.stdout.split("round 2 of 2")[1]
    assert "round 1 of 2" in result.stdout
    assert all(f" {name} " in result.stdout for name in ("round1", "round2"))  # columns of the table
    (second,) = (run for run in runs_of(others, "dpo") if run.name.endswith("-round2"))
    start = json.loads((second / "settings.json").read_text())["start"]
    (first,) = (run for run in runs_of(others, "dpo") if Path(start).is_relative_to(run))
    assert Path(start).name.startswith("global_step_")  # its adapter, which the second goes on with
    assert metrics_of(second)[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-3)  # the reference is new
    assert (second / "pairs.parquet").read_bytes() != (first / "pairs.parquet").read_bytes()


@pytest.mark.long  # test_own_samples.py says it of another engine
def test_sft_on_accepted_samples_says_when_none_is_accepted(others):
    """A random model is never right: rejection sampling leaves nothing, and says what to do."""
    result = make("sft", **{**others, "INIT": "sft", "SFT_SOURCE": "samples"})
    assert error_line(result) and not list((Path(others["ARTIFACTS"]) / "runs" / TASK).glob("sft-*/checkpoints"))


LORA = {"INIT": "sft", "LORA_RANK": "8", "SFT_STEPS": "20", "SFT_LOSS": "9999"}


@pytest.mark.long
def test_sft_with_lora_ends_by_its_loss_and_exports_its_adapter(others):
    result = make("sft", **{**others, **LORA})
    assert result.returncode == 0 and "below SFT_LOSS=9999" in result.stdout, result.stdout
    (run,) = (run for run in runs_of(others, "sft") if recorded(run)["settings"]["LORA_RANK"])
    changed = trained_parameters(others, run)
    assert changed and all("_proj" in name for name in changed)
    assert (run / "checkpoints/global_step_4/adapter/adapter_config.json").is_file()


@pytest.mark.long
def test_rl_goes_on_with_the_adapter_of_the_warm_up(others):
    """The warm-up is that of the test above. Nothing is merged on the way, and all of it is evaluated."""
    from safetensors.torch import load_file

    result = make("train", **{**others, **LORA, "KL_COEF": "0"})
    assert result.returncode == 0, result.stdout
    assert all(f" {name} " in result.stdout for name in ("base", "sft", "grpo"))  # columns of the table
    run = runs_of(others, "grpo")[-1]
    adapter = Path(recorded(run)["start"])
    assert adapter.name == "adapter" and recorded(run)["base"] == others["MODEL"]
    model = yaml.safe_load((run / "launches/000/config.yaml").read_text())["actor_rollout_ref"]["model"]
    assert (model["path"], model["lora_adapter_path"]) == (others["MODEL"], str(adapter))
    before, after = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (adapter, run / "checkpoints/global_step_2/actor/adapter")
    )
    assert before.keys() == after.keys()
    moved = [float((after[name] - before[name]).norm() / before[name].norm()) for name in before if "lora_A" in name]
    assert 0 < max(moved) < 0.1  # a new adapter would have other numbers altogether
    assert not list(run.glob("checkpoints/**/merged"))
