"""RL methods with LoRA, two real steps on a very small random model, and their comparison.

All weights are trained with grpo, gspo and egpo in test_numerics.py; ppo is in test_reward_model.py, with LoRA;
test_end_to_end.py resumes and evaluates grpo.
"""

import json
from pathlib import Path

import pytest

from tests.helpers import make
from tests.small_runs import COMMON, TASK, check_run, metrics_of, runs_of

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
