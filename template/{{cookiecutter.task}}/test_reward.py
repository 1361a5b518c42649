"""Tests of this task's reward; `make test` runs them."""

{% if cookiecutter.reward == "environment" %}
from itertools import islice
{% endif %}
from pathlib import Path

import pytest

{% import "imports.jinja" as imports with context %}
{% set of_reward = {"judge": ["from tasks.common.rewards import judge"], "environment": ["from tasks.common.rewards import gym"]} %}
{% set common = of_reward.get(cookiecutter.reward, []) + ["from tasks.common.rewards.examples import check_examples"] %}
{{ imports.sorted(common, "reward import " ~ ("CONFIG, ENV, " if cookiecutter.reward == "environment" else "") ~ "compute_score") }}
{% include cookiecutter.reward ~ "/tests.py" %}


def test_examples_get_the_scores_that_they_state():
    assert check_examples(Path(__file__).parent, compute_score) > 0


@pytest.mark.parametrize(("response", "score"), CASES)
def test_score(response, score):
    assert compute_score("", response, TRUTH)["score"] == score


def test_every_response_gets_the_same_keys():
    keys = {frozenset(compute_score("", response, TRUTH)) for response, _ in CASES}
    assert len(keys) == 1
