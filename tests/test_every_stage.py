"""All stages of each task, as a user types them, on the very small random model, without a network.

What is trained is real (verl, vLLM); a random model learns nothing in two steps, so only the shape of results is told.
countdown: test_end_to_end.py.
"""

import json
from pathlib import Path

import pytest

from tests.helpers import ROOT, SMALL, checkout_with, make
from verl_tasks.rows import read_rows

pytestmark = pytest.mark.long

VARIABLES = SMALL | {
    "MAX_RESPONSE_LENGTH": "224",  # a byte is a token
    "MAX_NEW_TOKENS": "32",
    "SAVE_FREQ": "2",
}
# What each task changes, and its own metrics.
TASKS = {
    "gsm8k": ({"MAX_PROMPT_LENGTH": "800"}, {"hashes", "format_loss", "marked", "boxed"}),
    "tool_calling": ({"MAX_PROMPT_LENGTH": "2000", "MAX_SAMPLES": "28"}, {"parsed", "names", "missing", "extra"}),
    "econ_agent": (
        {"MAX_PROMPT_LENGTH": "1000", "INIT": "base"},
        {"json", "minus_one", "work_std", "work", "consumption", "unemployment"},
    ),
    "gym_sums": ({"MAX_PROMPT_LENGTH": "800", "INIT": "base"}, {"failed"}),
}
GYM = {"SOURCE": "reasoning_gym", "ENV": "chain_sum", "CONFIG": '{"max_terms": 3}'}


@pytest.mark.parametrize("name", TASKS)
def test_every_stage(name, small_model, tmp_path):
    changes, keys = TASKS[name]
    artifacts = tmp_path / "artifacts"
    variables = VARIABLES | {"TASK": name, "MODEL": str(small_model), "ARTIFACTS": str(artifacts)} | changes
    checkout = checkout_with(name, tmp_path, **GYM) if name == "gym_sums" else ROOT

    def done(goal: str, **more: str) -> str:
        result = make(goal, cwd=checkout, **variables | more)
        assert result.returncode == 0, result.stdout
        return result.stdout

    def only(pattern: str) -> Path:
        (path,) = artifacts.glob(pattern)
        return path

    done("data")
    manifest = json.loads(only(f"data/{name}/manifest.json").read_text())
    assert (manifest["rows"]["train"], manifest["rows"]["test"]) == (16, 8)
    done("train", STEPS="2")
    rows = [json.loads(line) for line in (only(f"runs/{name}/grpo-*") / "rollouts/1.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and all(-1 <= row["score"] <= 1 for row in rows)
    done("eval", LIMIT="8")
    for file in artifacts.glob(f"eval/{name}/*/summary.json"):
        summary = json.loads(file.read_text())
        assert summary["prompts"] == 8 and summary["errors"] == 0
        assert keys | {"accuracy", "pass@2", "score", "format"} <= summary["metrics"].keys()
    if name == "econ_agent":
        done("simulate", MONTHS="2", AGENTS="3")
        simulation = json.loads(only("eval/econ_agent/simulation-*/simulation.json").read_text())
        assert simulation["indicators"].keys() == {"base", "grpo", "rule"}
        done("merge")
        assert (only("runs/econ_agent/grpo-*") / "checkpoints/global_step_2/actor/merged").is_dir()
    if name == "tool_calling":
        done("probe", LIMIT="8", N="4")
        assert json.loads(only("probe/tool_calling/*/probe.json").read_text())["prompts"] == 8
        assert "irrelevance" in done("bfcl", LIMIT="2", MAX_PROMPT_LENGTH="3000")


def test_every_stage_of_episodes(small_model, tmp_path):
    """The warm-up is long enough that the random model writes calls and ends its turns."""
    variables = SMALL | {"TASK": "calculator", "MODEL": str(small_model), "ARTIFACTS": str(tmp_path), "STEPS": "2"}
    variables |= {"MAX_PROMPT_LENGTH": "768", "MAX_RESPONSE_LENGTH": "384", "MAX_TURN_LENGTH": "110"}
    variables |= {"TRAIN_SIZE": "64", "SFT_SIZE": "64", "SFT_STEPS": "150", "SFT_BATCH_SIZE": "8", "SFT_LR": "5e-3"}
    result = make("train", **variables)
    assert result.returncode == 0, result.stdout
    assert "2 steps, " in result.stdout and "tool_errors" in result.stdout
    (run,) = tmp_path.glob("runs/calculator/grpo-*")
    lines = [json.loads(line)["data"] for line in (run / "metrics/000.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(step["num_turns/max"] > 2 for step in lines)
    # The trainer computes the probabilities of the tokens that the engine sampled, over all turns.
    assert all(step["training/rollout_actor_probs_pearson_corr"] > 0.99 for step in lines)
    episodes = [json.loads(line) for line in (run / "rollouts/1.jsonl").read_text().splitlines()]
    assert len(episodes) == 16 and any("<tool_response>" in episode["output"] for episode in episodes)
    for episode in episodes:  # the turns are those of this episode, and all of it
        assert all(text in episode["output"] for text in episode["turns"])
        assert ("<tool_response>" in episode["output"]) == any("<tool_response>" in t for t in episode["turns"][1::2])
    summaries = [json.loads(file.read_text()) for file in tmp_path.glob("eval/calculator/*/summary.json")]
    assert len(summaries) == 3 and all("turns" in summary["metrics"] for summary in summaries)
    assert max(summary["metrics"]["turns"]["value"] for summary in summaries) > 1


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
