"""Validation, the best checkpoints and PATIENCE in the training loop of the real verl 0.6.1, on the CPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.wheels import unpacked

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    """What tests/verl_061_keep_best.py found."""
    environment = os.environ | {"PYTHONPATH": f"{unpacked('verl==0.6.1')}:{ROOT}"}
    environment.pop("VERL_USE_EXTERNAL_MODULES", None)
    command = [sys.executable, "-m", "tests.verl_061_keep_best", str(tmp_path_factory.mktemp("runs"))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == "0.6.1"
    return found


def test_the_best_and_the_last_stay(result):
    assert result["best"] == {"kept": [2, 5, 8], "logged": [1, 2, 3, 4, 5, 6, 7, 8]}


def test_patience_ends_the_run_and_more_of_it_continues(result):
    assert result["patience"] == {"kept": [2, 4], "logged": [1, 2, 3, 4]}
    assert result["continued"] == {"kept": [5, 8], "logged": [1, 2, 3, 4, 5, 6, 7, 8]}
