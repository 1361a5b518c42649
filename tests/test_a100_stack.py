"""The patches of stacks/a100 on the real verl 0.6.1, on the CPU. On a GPU: docs/GPU.md."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.wheels import unpacked


@pytest.fixture(scope="module")
def result() -> dict:
    """What tests/verl_061.py found. All patches load with it: each looks for the lines that it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": f"{unpacked('verl==0.6.1')}:{ROOT}"}
    environment.pop("VERL_USE_EXTERNAL_MODULES", None)
    command = [sys.executable, "-m", "tests.verl_061", port]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == "0.6.1"
    return found


def test_prompts_go_on_in_the_same_order_after_a_resume_in_any_epoch(result):
    assert all(result["resumes"]["own"])
    # What the sampler is for: verl's own repeats the first epoch's order in the third step, of the second epoch.
    assert result["resumes"]["verl"] == [True, True, False, False, False]


def test_a_step_of_one_update_without_the_pass_is_verls_with_it(result):
    assert result["same weights"]
    assert result["found"] == pytest.approx(result["wanted"], rel=1e-5)
    assert {"actor/entropy", "training/rollout_probs_diff_mean"} < set(result["wanted"])


def test_the_pass_is_made_where_something_wants_it(result):
    assert result["pass"] == [True] * 7


def test_dr_grpos_loss_is_a_mean_over_responses_however_they_are_split(result):
    assert result["dr_grpo losses"] == pytest.approx([result["dr_grpo wanted"]] * 3, rel=1e-4)


def test_the_metric_of_the_entropy_is_of_a_token_whatever_the_loss(result):
    assert result["entropy"] == pytest.approx(result["entropy wanted"])
