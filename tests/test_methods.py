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
    found = json.loads(file.read_text())
    pairs = ["grpo - start", "gspo - start", "egpo - start", "gspo - grpo", "egpo - grpo"]
    assert list(found["differences"]) == pairs
    assert all({"value", "low", "high"} <= found["differences"][pair]["score"].keys() for pair in pairs)
    assert {name: figures["steps"] for name, figures in found["training"].items()} == dict.fromkeys(RL, 2)
    assert "METHOD" not in found["settings"] and found["settings"]["MINI_BATCH_SIZE"] == 2
    assert file.with_suffix(".md").read_text().count("|") > 50


@pytest.mark.long  # after the experiment
def test_the_rollouts_have_the_rewards_of_the_tasks_own_function(variables):
    """Those of the LoRA GRPO run of the experiment, whose adapter alone is evaluated as well."""
    run = runs_of(variables, "grpo")[-1]
    rows = [json.loads(line) for line in (run / "rollouts/1.jsonl").read_text().splitlines()]
    scores = [row["score"] for row in rows]
    assert scores == pytest.approx([sum(c in "0123456789" for c in row["output"]) / 10 for row in rows])
    assert len(rows) == 16 and len(set(scores)) > 1
    adapter = run / "checkpoints/global_step_2/actor/merged/lora_adapter"
    evaluated = make("eval", **{**variables, "MODEL": str(adapter), "BASE": variables["MODEL"], "LIMIT": "2"})
    assert evaluated.returncode == 0, evaluated.stdout
    assert "lora_adapter-" in evaluated.stdout


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
