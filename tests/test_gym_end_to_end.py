"""A task made from a reasoning-gym environment, by all its stages."""

from functools import partial

import pytest

from tests.helpers import checkout_with, make
from tests.stages import VARIABLES, run_stages

pytestmark = pytest.mark.long


def test_every_stage(small_model, tmp_path):
    made = {"SOURCE": "reasoning_gym", "ENV": "chain_sum", "CONFIG": '{"max_terms": 3}'}
    checkout = checkout_with("gym_sums", tmp_path, **made)
    own = {"TASK": "gym_sums", "MODEL": str(small_model), "ARTIFACTS": str(tmp_path / "artifacts")}
    own |= {"MAX_PROMPT_LENGTH": "800", "INIT": "base"}
    run_stages(partial(make, cwd=checkout), VARIABLES | own, {"failed"})
