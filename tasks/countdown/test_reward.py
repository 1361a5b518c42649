"""Tests of this task's reward; `make test` runs them. More of them: test_scores.py."""

import random
import time
from itertools import islice
from pathlib import Path

import pytest

from tasks.common.rewards.examples import check_examples
from tasks.countdown.prepare_data import problems
from tasks.countdown.reward import compute_score

TRUTH = {"target": 11, "numbers": [3, 4, 5]}


def test_examples_get_the_scores_that_they_state():
    assert check_examples(Path(__file__).parent, compute_score) > 0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>so</think><answer>(5*3)-4</answer>", 1.0),
        ("<answer>5×3−4 = 11</answer>", 1.0),
        ("<answer>5*3-4</answer>", 1.0),  # right is right
        ("<answer>3+4+5</answer>", 0.0),  # a guess
        ("<think>3+4=7, 7+5=12</think><answer>3+4+5</answer>", 0.1),
        ("<think>3+4=7, 7+5=12</think><answer>3+4</answer>", 0.0),  # not the given numbers
        ("<think>hm</think><answer>3+4+5</answer>", 0.0),
        ("<think>3+4+5=11</think><answer>3+4+5</answer>", 0.0),  # no such calculation
        ("<think>12=12</think><answer>3+4+5</answer>", 0.0),
        ("<think>(5-3)/4=1/2</think><answer>3+4+5</answer>", 0.1),
        ("3+4+5=12 <answer>3+4+5</answer>", 0.0),  # outside of a thought
        ("<think>5*3=15</think><answer>5*3-4</answer><answer>3+4+5</answer>", 0.1),  # the last answer counts
        ("<think><answer>5*3-4</answer></think>", 0.0),  # thinking is no answer
        ("5*3-4", 0.0),
        ("", 0.0),
    ],
)
def test_score(response, score):
    assert compute_score("countdown", response, TRUTH)["score"] == score


def test_a_guess_earns_no_partial_credit_and_a_thought_does():
    """A policy that writes the numbers with any signs, without thinking, earns what it gets right by luck alone."""
    rng = random.Random(0)
    guessed, thought, ladder = 0.0, 0.0, 0.0
    for problem in islice(problems(rng, "hard"), 200):
        guess = "".join(f"{rng.choice('+-*')}{n}" for n in problem["numbers"])[1:]
        guessed += compute_score("countdown", f"<answer>{guess}</answer>", problem)["score"] / 200
        ladder += compute_score("countdown", f"<answer>{guess}</answer>", problem, variant="ladder")["score"] / 200
        thought += compute_score("countdown", f"<think>2*3=6</think><answer>{guess}</answer>", problem)["score"] / 200
    assert guessed < 0.05 and ladder > 0.29 and 0.1 <= thought < 0.15


def test_a_long_thought_is_read_at_once():
    started = time.perf_counter()
    for part in ("(", "1+", "1 ", "((1+1)", "1=", "9-" * 30 + "="):
        thinking = part * (1_000_000 // len(part))
        assert compute_score("countdown", f"<think>{thinking}</think><answer>3+4+5</answer>", TRUTH)["score"] == 0.0
    assert time.perf_counter() - started < 1


def test_every_response_gets_the_same_keys():
    keys = {frozenset(compute_score("countdown", response, TRUTH)) for response in ("", "<answer>1</answer>")}
    assert len(keys) == 1


SIGNS = ["（3+4）", "３＋４", "$3+4$", "`3+4`", r"\(3+4\)", "3\u200b+4", "3 ﹢ 4", "$$3+4$$", "3＋4＝7"]


@pytest.mark.parametrize("answer", SIGNS)
def test_a_sum_in_signs_of_other_scripts_is_right(answer):
    assert compute_score("countdown", f"<answer>{answer}</answer>", {"target": 7, "numbers": [3, 4]})["score"] == 1.0


@pytest.mark.parametrize(
    "answer, target",
    [("3⋅6", 18), ("3×6", 18), (r"$3 \times 6$", 18), ("6－3", 3), ("6−3", 3), ("6／3", 2), (r"6\div 3", 2)],
)
def test_other_signs_are_read_as_numbers_are(answer, target):
    assert (
        compute_score("countdown", f"<answer>{answer}</answer>", {"target": target, "numbers": [3, 6]})["score"] == 1.0
    )


@pytest.mark.parametrize("answer", ["3**6", "6//3", "`3`+`6`", "3 6", "3²+6", "٣+6"])
def test_what_is_no_arithmetic_stays_none(answer):
    assert compute_score("countdown", f"<answer>{answer}</answer>", {"target": 9, "numbers": [3, 6]})["format"] == 0.0
