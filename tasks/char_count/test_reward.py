"""Tests of this task's reward; `make test` runs them."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.char_count.prepare_data import example, generate
from tasks.char_count.reward import compute_score
from verl_tasks import check_examples

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


def test_a_hard_demonstration_is_verl_recipes():
    made = example("n", list("nine"), "hard")
    assert made.prompt == "How many n are there in word n-i-n-e?" and made.ground_truth == "2"
    assert made.demonstration == "n = n.\ni != n.\nn = n.\ne != n.\n\\boxed{2} n in n-i-n-e."


def test_an_easy_demonstration_counts_as_it_goes():
    made = example("n", list("nine"), "easy")
    assert made == replace(example("n", list("nine"), "hard"), demonstration=made.demonstration)
    assert made.demonstration == "n = n 1.\ni != n.\nn = n 2.\ne != n.\n\\boxed{2} n in n-i-n-e."


@pytest.mark.parametrize(("difficulty", "shortest", "longest"), [("easy", 3, 6), ("hard", 5, 20)])
def test_words_have_the_letters_that_the_readme_states(difficulty, shortest, longest):
    made = itertools.islice(generate(SimpleNamespace(SEED=1, DIFFICULTY=difficulty)), 500)
    lengths = {len(example.prompt.split()[-1].rstrip("?").split("-")) for example in made}
    assert lengths == set(range(shortest, longest + 1))
