"""Tests of this task's reward; `make test` runs them."""

from pathlib import Path

import pytest

from tasks.common.examples import check_examples
from tasks.fresh_lora.reward import compute_score

TRUTH = "12"


def test_examples_get_the_scores_that_they_state():
    assert check_examples(Path(__file__).parent, compute_score) > 0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (f"<think>so</think><answer>{TRUTH}</answer>", 1.0),
        (f"<answer>{TRUTH}</answer> and more text", 1.0),
        (f"<answer>{TRUTH}</answer><answer>7</answer>", 0.1),  # the last answer counts
        (f"<think><answer>{TRUTH}</answer></think>", 0.0),  # thinking is no answer
        (f"the answer is {TRUTH}", 0.0),
        ("", 0.0),
    ],
)
def test_score(response, score):
    assert compute_score("fresh_lora", response, TRUTH)["score"] == score


def test_every_response_gets_the_same_keys():
    keys = {frozenset(compute_score("fresh_lora", response, TRUTH)) for response in ("", "<answer>1</answer>")}
    assert len(keys) == 1
