"""Every method, two real steps on a very small random model: all weights and LoRA, rounds, resume, comparison.

test_numerics.py trains all weights with grpo, gspo and egpo, test_end_to_end.py resumes and evaluates grpo.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tasks.common.runs import hf_folder, recorded
from tests.helpers import MAKE, ROOT, SMALL, change_reward, make, our_processes, outside_make

pytestmark = pytest.mark.slow

TASK = "digits_of_methods"
COMMON = SMALL | {
    "TASK": TASK,
    "INIT": "base",
    "STEPS": "2",
    "MINI_BATCH_SIZE": "2",
    "TRAIN_SIZE": "64",
    "SAMPLED_PROMPTS": "0",  # most responses of a random model are cut, and make no chosen one
    "KL_COEF": "0.01",
    "MAX_PROMPT_LENGTH": "384",
}
RL = ("grpo", "gspo", "egpo", "ppo")


@pytest.fixture(scope="module")
def variables(small_model, tmp_path_factory):
    """Settings of a task whose reward a random model can get: the digits in its answer."""
    task = ROOT / "tasks" / TASK
    assert make("new", TASK=TASK).returncode == 0
    try:
        change_reward(
            task, "return {'score': sum(c in '0123456789' for c in solution_str) / 10, 'acc': 0.0, 'format': 0.0}"
        )
        yield COMMON | {"MODEL": str(small_model), "ARTIFACTS": str(tmp_path_factory.mktemp("methods") / "artifacts")}
    finally:
        shutil.rmtree(task)


def runs_of(variables, method: str) -> list[Path]:
    """The runs of a method, the newest last."""
    found = (Path(variables["ARTIFACTS"]) / "runs" / TASK).glob(f"{method}-*")
    return sorted(found, key=lambda run: (run / "settings.json").stat().st_mtime)


def metrics_of(run: Path) -> dict[int, dict]:
    lines = [line for file in sorted((run / "metrics").glob("*.jsonl")) for line in file.read_text().splitlines()]
    return {record["step"]: record["data"] for record in map(json.loads, lines)}


def trained_parameters(variables, run: Path, step: int = 2) -> set[str]:
    """Names of the parameters in which the checkpoint differs from MODEL; all of it must be finite."""
    import torch
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(hf_folder(run, str(step)))
    start = AutoModelForCausalLM.from_pretrained(variables["MODEL"])
    assert all(torch.isfinite(p).all() for p in trained.parameters())
    named = trained.named_parameters()
    return {name for name, p in named if not torch.equal(p.float(), start.get_parameter(name).float())}


def kill_after_a_checkpoint(goal: str, chosen: dict[str, str], run: str) -> int:
    """Run make and end it with SIGKILL once ``run`` (a pattern) has a checkpoint; its step is returned."""
    command = [*MAKE, goal, *(f"{k}={v}" for k, v in chosen.items())]
    tracker = f"{run}/checkpoints/latest_checkpointed_iteration.txt"
    with subprocess.Popen(
        command, cwd=ROOT, env=outside_make(), stdout=subprocess.DEVNULL, start_new_session=True
    ) as killed:
        deadline = time.monotonic() + 600
        while not list(Path(chosen["ARTIFACTS"]).glob(tracker)):
            assert killed.poll() is None and time.monotonic() < deadline, "ended before its first checkpoint"
            time.sleep(0.2)
        os.killpg(killed.pid, signal.SIGKILL)
    time.sleep(5)  # for the engines to notice that their parent is gone
    assert chosen["ARTIFACTS"] not in our_processes()
    return int(next(Path(chosen["ARTIFACTS"]).glob(tracker)).read_text())


def check_run(variables, method: str, rank: int) -> Path:
    run = runs_of(variables, method)[-1]
    metrics = metrics_of(run)
    assert sorted(metrics) == [1, 2]
    losses = {"dpo": ["train/loss"], "ppo": ["actor/pg_loss", "critic/vf_loss"]}.get(method, ["actor/pg_loss"])
    for step in metrics.values():
        assert all(math.isfinite(value) for value in step.values() if isinstance(value, float))
        assert set(losses) <= step.keys()
    changed = trained_parameters(variables, run)
    assert changed
    assert bool(rank) == all("_proj" in name for name in changed)
    return run


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


@pytest.mark.parametrize("rank", [0, 8])
def test_two_steps_of_dpo_on_the_policys_own_samples(variables, rank):
    result = make("dpo", **variables, LORA_RANK=str(rank))
    assert result.returncode == 0, result.stdout
    assert "DPO 2/2" in result.stdout
    run = check_run(variables, "dpo", rank)
    assert metrics_of(run)[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-3)  # policy and reference are equal


def test_rounds_of_dpo_start_from_the_round_before(variables):
    result = make("dpo", **variables, SELF_PLAY_ROUNDS="2")
    assert result.returncode == 0, result.stdout
    assert "up to date: 2 steps" not in result.stdout.split("round 2 of 2")[1]
    assert "round 1 of 2" in result.stdout
    assert all(f" {name} " in result.stdout for name in ("round1", "round2"))  # columns of the table
    (second,) = (run for run in runs_of(variables, "dpo") if run.name.endswith("-round2"))
    start = json.loads((second / "settings.json").read_text())["start"]
    (first,) = (run for run in runs_of(variables, "dpo") if start.startswith(f"{run}/"))
    assert metrics_of(second)[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-3)  # the reference is new
    assert (second / "pairs.parquet").read_bytes() != (first / "pairs.parquet").read_bytes()


def test_a_round_that_was_killed_goes_on_from_its_checkpoint(variables):
    """The second round of LoRA GRPO, killed after its first step; the first round is the run of the test above."""
    chosen = variables | {"METHOD": "grpo", "LORA_RANK": "8", "SELF_PLAY_ROUNDS": "2"}
    kill_after_a_checkpoint("train", chosen, f"runs/{TASK}/grpo-*-round2")
    result = make("train", **chosen)
    assert result.returncode == 0, result.stdout
    (second,) = (run for run in runs_of(variables, "grpo") if run.name.endswith("-round2"))
    assert sorted(metrics_of(second)) == [1, 2]
    start = json.loads((second / "settings.json").read_text())["start"]
    assert start.endswith("global_step_2/actor/merged")
    assert all(f" {name} " in result.stdout for name in ("round1", "round2"))


def test_sft_on_accepted_samples_says_when_none_is_accepted(variables):
    """A random model is never right: rejection sampling leaves nothing, and says what to do."""
    result = make("sft", **{**variables, "INIT": "sft", "SFT_SOURCE": "samples"})
    errors = [line for line in result.stdout.splitlines() if line.startswith("error:")]
    assert result.returncode != 0 and len(errors) == 1, result.stdout
    assert not list((Path(variables["ARTIFACTS"]) / "runs" / TASK).glob("sft-*/checkpoints"))


def test_a_warm_up_that_was_killed_goes_on_from_its_checkpoint(variables):
    chosen = variables | {"INIT": "sft", "SFT_STEPS": "30"}
    saved = kill_after_a_checkpoint("sft", chosen, f"runs/{TASK}/sft-*")
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


def test_all_runs_every_stage_and_from_leaves_out_the_first(variables):
    chosen = variables | {"METHOD": "ppo", "LORA_RANK": "0"}
    result = make("all", **chosen, FROM="train")
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("left out (FROM=train)") == 2 and "[7/7] compare" in result.stdout
    assert "prompts gained" in result.stdout
    refused = make("all", **{**chosen, "TRAIN_SIZE": "63"}, FROM="train")
    assert refused.returncode != 0 and "error: FROM=train: " in refused.stdout
    assert "was made with other settings" in refused.stdout
