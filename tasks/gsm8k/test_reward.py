"""Tests of this task's reward; `make test` runs them. More of them: test_task.py, tests/test_math_answer.py."""

from pathlib import Path

import pytest

from tasks.gsm8k.reward import compute_score
from verl_tasks import check_examples


def test_examples_get_the_scores_that_they_state():
    assert check_examples(Path(__file__).parent, compute_score) > 0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("9 * 2 = 18\n#### 18", 1.0),
        ("#### 18\n#### 17", 0.0),  # the last answer counts
        ("#### 18 or 17", 0.0),  # two answers are none
        ("<think>#### 18</think>", 0.0),  # thinking is no answer
        ("18", 0.0),
        ("", 0.0),
    ],
)
def test_score(response, score):
    assert compute_score("gsm8k", response, "18")["score"] == score


def test_every_response_gets_the_same_keys():
    keys = {frozenset(compute_score("gsm8k", response, "18")) for response in ("", "#### 1", "\\boxed{18}")}
    assert len(keys) == 1
