"""Tests of this task's reward; `make test` runs them. More of them: test_scores.py."""

from pathlib import Path

import pytest

from tasks.common.rewards.examples import check_examples
from tasks.countdown.reward import compute_score

TRUTH = {"target": 11, "numbers": [3, 4, 5]}


def test_examples_get_the_scores_that_they_state():
    assert check_examples(Path(__file__).parent, compute_score) > 0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>so</think><answer>(5*3)-4</answer>", 1.0),
        ("<answer>5×3−4 = 11</answer>", 1.0),
        ("<answer>3+4+5</answer>", 0.3),
        ("<answer>5*3-4</answer><answer>7</answer>", 0.1),  # the last answer counts
        ("<think><answer>5*3-4</answer></think>", 0.0),  # thinking is no answer
        ("5*3-4", 0.0),
        ("", 0.0),
    ],
)
def test_score(response, score):
    assert compute_score("countdown", response, TRUTH)["score"] == score


def test_every_response_gets_the_same_keys():
    keys = {frozenset(compute_score("countdown", response, TRUTH)) for response in ("", "<answer>1</answer>")}
    assert len(keys) == 1
