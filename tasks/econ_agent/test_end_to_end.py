"""All stages on the very small random model, as a user types them, and the simulation."""

import json

import pytest

from tests.helpers import make
from tests.stages import VARIABLES, only, run_stages

pytestmark = pytest.mark.long


def test_every_stage(small_model, tmp_path):
    variables = VARIABLES | {"TASK": "econ_agent", "MODEL": str(small_model), "ARTIFACTS": str(tmp_path / "artifacts")}
    variables |= {"MAX_PROMPT_LENGTH": "1000", "INIT": "base"}
    run_stages(make, variables, {"json", "minus_one", "work_std", "work", "consumption", "unemployment"})

    result = make("simulate", MONTHS="2", AGENTS="3", **variables)
    assert result.returncode == 0, result.stdout
    found = json.loads(only(variables, "eval/econ_agent/simulation-*/simulation.json").read_text())
    assert found["indicators"].keys() == {"base", "grpo", "rule"}
    assert make("merge", **variables).returncode == 0
    assert (only(variables, "runs/econ_agent/grpo-*") / "checkpoints/global_step_2/actor/merged").is_dir()
