"""All stages on the very small random model, as a user types them."""

import pytest

from tests.helpers import make
from tests.stages import VARIABLES, run_stages

pytestmark = pytest.mark.long


def test_every_stage(small_model, tmp_path):
    variables = VARIABLES | {"TASK": "gsm8k", "MODEL": str(small_model), "ARTIFACTS": str(tmp_path / "artifacts")}
    variables |= {"MAX_PROMPT_LENGTH": "800"}
    run_stages(make, variables, {"hashes", "format_loss", "marked", "boxed"})
