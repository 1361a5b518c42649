"""Tests of this task's reward; `make test` runs them."""

from pathlib import Path

import pytest

from tasks.char_count.prepare_data import example
from tasks.char_count.reward import compute_score
from tasks.common.rewards.examples import check_examples

TRUTH = "2"
CASES = [
    ("n = n.\ni != n.\nn = n.\n\\boxed{2} n in n-i-n.", 1.0),
    ("\\boxed{1}\n\\boxed{2}", 1.0),  # the last answer counts
    ("\\boxed{3} n in n-i-n.", 0.0),
    ("\\boxed{1 + 1}", 0.0),  # a sum that is still to be done
    ("<think>\\boxed{2}</think>", 0.0),  # thinking is no answer
    ("2", 0.0),
    ("", 0.0),
]


def test_examples_get_the_scores_that_they_state():
    assert check_examples(Path(__file__).parent, compute_score) > 0


@pytest.mark.parametrize(("response", "score"), CASES)
def test_score(response, score):
    assert compute_score("", response, TRUTH)["score"] == score


def test_every_response_gets_the_same_keys():
    keys = {frozenset(compute_score("", response, TRUTH)) for response, _ in CASES}
    assert len(keys) == 1


def test_a_demonstration_is_verl_recipes():
    made = example("n", list("nine"))
    assert made.prompt == "How many n are there in word n-i-n-e?" and made.ground_truth == "2"
    assert made.demonstration == "n = n.\ni != n.\nn = n.\ne != n.\n\\boxed{2} n in n-i-n-e."
