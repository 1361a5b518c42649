"""Tests of this task's environment, without a model; `make test` runs them."""

from pathlib import Path

import pytest

{% import "imports.jinja" as imports with context %}
{% set common = ["from tasks.common.rewards.examples import check_episodes"] %}
{{ imports.sorted(common, "environment import PACKAGE, Environment") }}

@pytest.mark.skipif(not PACKAGE.installed.exists(), reason="make data installs the environment")
def test_examples_get_the_scores_that_they_state():
    assert check_episodes(Path(__file__).parent, Environment) > 0
