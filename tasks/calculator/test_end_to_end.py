"""All stages on the very small random model, as a user types them."""

import json

import pytest

from tests.helpers import SMALL, make

pytestmark = pytest.mark.long


def test_every_stage(small_model, tmp_path):
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
