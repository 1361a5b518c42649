"""Tests of this task's reward; `make test` runs them. More of them: test_task.py."""

import json
from pathlib import Path

import pytest

from tasks.econ_agent.reward import compute_score
from verl_tasks import check_examples

# Targets by hand: nothing saved, so work 1; essentials cost 60 * 25 = 1500 of 6000, so consumption sqrt(1/4) = 0.5.
POOR = {"income": 6000, "savings": 0, "price": 25, "interest": 0.03, "inflation": 0.02, "unemployment": 0.05}
RIGHT = '{"work": 1.0, "consumption": 0.5}'


def test_examples_get_the_scores_that_they_state():
    assert check_examples(Path(__file__).parent, compute_score) > 0


@pytest.mark.parametrize(
    ("work", "consumption", "score"),
    [
        (1, 0.5, 1.0),
        (0.9, 0.5, 0.9),  # (1 - 2 * 0.1 / 1 + 1) / 2
        (0.5, 0.5, 0.5),
        (1, 0.25, 0.5),
        (1, 1, 0.0),
        (0, 0.5, 0.0),
        (0, 0, -1.0),
        (0, 1, -1.0),
    ],
)
def test_score(work, consumption, score):
    result = compute_score("econ_agent", json.dumps({"work": work, "consumption": consumption}), POOR)
    assert result["score"] == pytest.approx(score)
    assert result["acc"] == (score >= 0.8)
    assert (result["format"], result["work"], result["consumption"]) == (1, work, consumption)


@pytest.mark.parametrize(
    ("response", "strict", "lenient"),
    [
        (RIGHT, 1, 1),
        (f"\n {RIGHT}\n", 1, 1),
        ('{"consumption": 5e-1, "work": 1}', 1, 1),
        (f"My decision: {RIGHT}", -1, 1),
        (f"```json\n{RIGHT}\n```", -1, 1),
        (f"<think>poor</think>{RIGHT}", -1, 1),
        (f"<think>{RIGHT}", -1, -1),
        (f"{RIGHT}{RIGHT}", -1, -1),
        (f"[{RIGHT}]", -1, 1),
        ('{"work": 1.0}', -1, -1),
        ('{"work": 1.0, "consumption": 0.5, "reason": "poor"}', -1, -1),
        ('{"work": 1.0, "work": 1.0, "consumption": 0.5}', -1, -1),
        ('{"Work": 1.0, "consumption": 0.5}', -1, -1),
        ('{"work": "1.0", "consumption": 0.5}', -1, -1),
        ('{"work": true, "consumption": 0.5}', -1, -1),
        ('{"work": null, "consumption": 0.5}', -1, -1),
        ('{"work": [1], "consumption": 0.5}', -1, -1),
        ('{"work": NaN, "consumption": 0.5}', -1, -1),
        ('{"work": Infinity, "consumption": 0.5}', -1, -1),
        ('{"work": 1e999, "consumption": 0.5}', -1, -1),
        ('{"work": 1.0000001, "consumption": 0.5}', -1, -1),
        ('{"work": 1.0, "consumption": -0.1}', -1, -1),
        ('{"work": 100, "consumption": 50}', -1, -1),
        ('{"work": 1' + "0" * 5000 + ', "consumption": 0.5}', -1, -1),
        ("{'work': 1.0, 'consumption': 0.5}", -1, -1),
        ("work: 1.0, consumption: 0.5", -1, -1),
        ("{}", -1, -1),
        ("", -1, -1),
    ],
)
def test_format(response, strict, lenient):
    assert compute_score("econ_agent", response, POOR)["score"] == strict
    assert compute_score("econ_agent", response, json.dumps(POOR), variant="lenient")["score"] == lenient


def test_an_answer_inside_a_thought_that_the_prompt_opened_does_not_count():
    opened = {"think_opened": True}
    assert compute_score("econ_agent", RIGHT, POOR, opened, variant="lenient")["score"] == -1
    assert compute_score("econ_agent", f"poor</think>{RIGHT}", POOR, opened, variant="lenient")["score"] == 1


def test_every_response_gets_the_same_keys():
    assert compute_score("econ_agent", RIGHT, POOR).keys() == compute_score("econ_agent", "", POOR).keys()
