"""Validation, the best checkpoints and PATIENCE in the training loop of the real verl 0.6.1, on the CPU."""

import pytest

from tests.wheels import found_with

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    """What tests/verl_061_keep_best.py found."""
    return found_with("verl==0.6.1", "verl_061_keep_best", tmp_path_factory.mktemp("runs"))


def test_the_best_and_the_last_stay(result):
    assert result["best"] == {"kept": [2, 5, 8], "logged": [1, 2, 3, 4, 5, 6, 7, 8]}


def test_patience_ends_the_run_and_more_of_it_continues(result):
    assert result["patience"] == {"kept": [2, 4], "logged": [1, 2, 3, 4]}
    assert result["continued"] == {"kept": [5, 8], "logged": [1, 2, 3, 4, 5, 6, 7, 8]}
