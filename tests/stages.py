"""All stages of one task, as a user types them, on the very small random model, without a network.

What is trained is real (verl, vLLM); a random model learns nothing in two steps, so only the shape of results is told.
"""

import json
from collections.abc import Callable
from pathlib import Path

from tests.helpers import SMALL

VARIABLES = SMALL | {
    "MAX_RESPONSE_LENGTH": "224",  # a byte is a token
    "MAX_NEW_TOKENS": "32",
    "SAVE_FREQ": "2",
}


def only(variables: dict[str, str], pattern: str) -> Path:
    """The one file or folder of ``pattern`` under ARTIFACTS."""
    (path,) = Path(variables["ARTIFACTS"]).glob(pattern)
    return path


def run_stages(make: Callable, variables: dict[str, str], keys: set[str]) -> None:
    """Data, two training steps and evaluation; ``keys`` are the task's own metrics."""
    name = variables["TASK"]
    result = make("data", **variables)
    assert result.returncode == 0, result.stdout
    manifest = json.loads(only(variables, f"data/{name}/manifest.json").read_text())
    assert (manifest["rows"]["train"], manifest["rows"]["test"]) == (16, 8)

    result = make("train", STEPS="2", **variables)
    assert result.returncode == 0, result.stdout
    run = only(variables, f"runs/{name}/grpo-*")
    rows = [json.loads(line) for line in (run / "rollouts/1.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and all(-1 <= row["score"] <= 1 for row in rows)

    result = make("eval", LIMIT="8", **variables)
    assert result.returncode == 0, result.stdout
    for file in Path(variables["ARTIFACTS"]).glob(f"eval/{name}/*/summary.json"):
        summary = json.loads(file.read_text())
        assert summary["prompts"] == 8 and summary["errors"] == 0
        assert keys | {"accuracy", "pass@2", "score", "format"} <= summary["metrics"].keys()
