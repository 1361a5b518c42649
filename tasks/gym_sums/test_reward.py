"""Tests of this task's reward; `make test` runs them."""

from itertools import islice
from pathlib import Path

import pytest

from tasks.common import gym
from tasks.common.examples import check_examples
from tasks.gym_sums.reward import CONFIG, ENV, compute_score

TRUTH = {"answer": "12", "metadata": {}}
CASES = [
    ("The answer is 12.", 0.0),
    ("<think><answer>12</answer></think>", 0.0),  # thinking is no answer
    ("<answer></answer>", 0.0),
    ("", 0.0),
]


def test_the_environments_own_answers_are_right():
    for found in islice(gym.examples(ENV, CONFIG, seed=0), 8):
        if found.demonstration:  # else any of many answers is right
            assert compute_score("", found.demonstration, found.ground_truth)["score"] == 1.0


def test_examples_get_the_scores_that_they_state():
    assert check_examples(Path(__file__).parent, compute_score) > 0


@pytest.mark.parametrize(("response", "score"), CASES)
def test_score(response, score):
    assert compute_score("", response, TRUTH)["score"] == score


def test_every_response_gets_the_same_keys():
    keys = {frozenset(compute_score("", response, TRUTH)) for response, _ in CASES}
    assert len(keys) == 1
