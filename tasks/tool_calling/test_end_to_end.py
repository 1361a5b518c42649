"""All stages on the very small random model, as a user types them; BFCL too. No task has longer prompts."""

import json

import pytest

from tests.helpers import make
from tests.stages import VARIABLES, only, run_stages

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def variables(small_model, tmp_path_factory) -> dict[str, str]:
    artifacts = tmp_path_factory.mktemp("tool-calling") / "artifacts"
    own = {"TASK": "tool_calling", "MODEL": str(small_model), "ARTIFACTS": str(artifacts)}
    return VARIABLES | own | {"MAX_PROMPT_LENGTH": "2000", "MAX_SAMPLES": "28"}


@pytest.mark.long
def test_every_stage(variables):
    run_stages(make, variables, {"parsed", "names", "missing", "extra"})


def test_probe_and_bfcl(variables):
    result = make("probe", **{**variables, "LIMIT": "8", "N": "4"})
    assert result.returncode == 0, result.stdout
    assert json.loads(only(variables, "probe/tool_calling/*/probe.json").read_text())["prompts"] == 8

    result = make("bfcl", **{**variables, "LIMIT": "2", "MAX_PROMPT_LENGTH": "3000"})
    assert result.returncode == 0, result.stdout
    assert "irrelevance" in result.stdout
