"""Every RL method, two real steps on a very small random model: all weights and LoRA, rounds, resume, comparison.

test_numerics.py trains all weights with grpo, gspo and egpo, test_end_to_end.py resumes and evaluates grpo.
"""

import json
from pathlib import Path

import pytest

from tests.helpers import kill_after_a_checkpoint, make
from tests.small_runs import COMMON, TASK, check_run, metrics_of, runs_of

pytestmark = pytest.mark.slow

RL = ("grpo", "gspo", "egpo", "ppo")


@pytest.fixture(scope="module")
def variables(digits_checkout, small_model, tmp_path_factory):
    """Settings of a training, and the folder of its Makefile."""
    artifacts = tmp_path_factory.mktemp("methods") / "artifacts"
    return COMMON | {"cwd": digits_checkout, "MODEL": str(small_model), "ARTIFACTS": str(artifacts)}


@pytest.mark.parametrize(("method", "rank"), [("ppo", 0), *((method, 8) for method in RL)])
def test_two_steps_of_each_rl_method(variables, method, rank):
    result = make("train", **variables, METHOD=method, LORA_RANK=str(rank))
    assert result.returncode == 0, result.stdout
    assert f"{method.upper()} 2/2" in result.stdout and f" {method} " in result.stdout  # a column of the table
    metrics = metrics_of(check_run(variables, method, rank))[2]
    assert metrics["critic/score/max"] > metrics["critic/score/min"]
    # The metric that shows that KL_COEF acts (docs/METHODS.md).
    shown = {"ppo": "actor/reward_kl_penalty"}.get(method, "actor/kl_loss")
    assert metrics[shown] != 0
    assert ("egpo/term" in metrics) == (method == "egpo")
    assert ("critic/values/mean" in metrics) == (method == "ppo")


def test_the_rollouts_have_the_rewards_of_the_tasks_own_function(variables):
    """Those of the LoRA GRPO run of the test above, whose adapter alone is evaluated as well."""
    run = runs_of(variables, "grpo")[-1]
    rows = [json.loads(line) for line in (run / "rollouts/1.jsonl").read_text().splitlines()]
    scores = [row["score"] for row in rows]
    assert scores == pytest.approx([sum(c in "0123456789" for c in row["output"]) / 10 for row in rows])
    assert len(rows) == 16 and len(set(scores)) > 1
    adapter = run / "checkpoints/global_step_2/actor/merged/lora_adapter"
    evaluated = make("eval", **{**variables, "MODEL": str(adapter), "BASE": variables["MODEL"], "LIMIT": "2"})
    assert evaluated.returncode == 0, evaluated.stdout
    assert "lora_adapter-" in evaluated.stdout


def test_the_experiment_compares_what_was_trained_with_the_same_settings(variables):
    before = {method: runs_of(variables, method) for method in RL}
    result = make("experiment", **variables, METHODS="grpo,gspo,egpo", LORA_RANK="8")
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("up to date: 2 steps") == 3  # the runs of the test before: same data, same settings
    assert {method: runs_of(variables, method) for method in RL} == before
    (file,) = Path(variables["ARTIFACTS"]).glob(f"experiments/{TASK}/start-grpo-gspo-egpo-*/experiment.json")
    found = json.loads(file.read_text())
    pairs = ["grpo - start", "gspo - start", "egpo - start", "gspo - grpo", "egpo - grpo"]
    assert list(found["differences"]) == pairs
    assert all({"value", "low", "high"} <= found["differences"][pair]["score"].keys() for pair in pairs)
    assert {name: figures["steps"] for name, figures in found["training"].items()} == dict.fromkeys(RL[:3], 2)
    assert "METHOD" not in found["settings"] and found["settings"]["MINI_BATCH_SIZE"] == 2
    assert file.with_suffix(".md").read_text().count("|") > 50


def test_a_round_that_was_killed_goes_on_from_its_checkpoint(variables):
    """The second round of LoRA GRPO, killed after its first step; the first is the run of the two steps above."""
    chosen = variables | {"METHOD": "grpo", "LORA_RANK": "8", "SELF_PLAY_ROUNDS": "2"}
    kill_after_a_checkpoint("train", f"runs/{TASK}/grpo-*-round2", **chosen)
    result = make("train", **chosen)
    assert result.returncode == 0, result.stdout
    (second,) = (run for run in runs_of(variables, "grpo") if run.name.endswith("-round2"))
    assert sorted(metrics_of(second)) == [1, 2]
    start = json.loads((second / "settings.json").read_text())["start"]
    assert start.endswith("global_step_2/actor/merged")
    assert all(f" {name} " in result.stdout for name in ("round1", "round2"))


def test_all_runs_every_stage_and_from_leaves_out_the_first(variables):
    chosen = variables | {"METHOD": "ppo", "LORA_RANK": "0"}
    result = make("all", **chosen, FROM="train")
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("left out (FROM=train)") == 2 and "[7/7] compare" in result.stdout
    assert "prompts gained" in result.stdout
    refused = make("all", **{**chosen, "TRAIN_SIZE": "63"}, FROM="train")
    assert refused.returncode != 0 and "error: FROM=train: " in refused.stdout
    assert "was made with other settings" in refused.stdout
