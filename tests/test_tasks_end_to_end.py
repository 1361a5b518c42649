"""Every task by its stages, as a user types them, on a very small random model, without a network.

What is trained is real (verl, vLLM); a random model learns nothing in two steps, so only the shape of results is told.
"""

import json
from functools import partial
from pathlib import Path

import pytest

from tests import helpers
from tests.helpers import ROOT, checkout_with, make

pytestmark = pytest.mark.slow

SMALL = helpers.SMALL | {
    "MAX_RESPONSE_LENGTH": "224",  # a byte is a token
    "MAX_NEW_TOKENS": "32",
    "SAVE_FREQ": "2",
}
# Variables of the task, its own metrics, and keys of its reward.
TASKS = {
    "gsm8k": ({"MAX_PROMPT_LENGTH": "800"}, {"hashes", "format_loss"}, {"marked", "boxed"}),
    "tool_calling": (
        {"MAX_PROMPT_LENGTH": "2000", "MAX_SAMPLES": "24"},
        set(),
        {"parsed", "names", "missing", "extra"},
    ),
    "econ_agent": (
        {"MAX_PROMPT_LENGTH": "1000", "INIT": "base"},
        {"json", "minus_one", "work_std"},
        {"work", "consumption", "unemployment"},
    ),
    "gym_sums": ({"MAX_PROMPT_LENGTH": "800", "INIT": "base"}, set(), {"failed"}),
}


# tool_calling has the longest prompts and tools; the others go the same way.
LONG = [name if name == "tool_calling" else pytest.param(name, marks=pytest.mark.long) for name in TASKS]


@pytest.fixture(scope="module", params=LONG)
def task(request, small_model, tmp_path_factory):
    """A task's name, `make` where it is, and its variables; gym_sums is made from a reasoning-gym environment first."""
    name = request.param
    folder, checkout = tmp_path_factory.mktemp(name), ROOT
    if name == "gym_sums":
        checkout = checkout_with(name, folder, SOURCE="reasoning_gym", ENV="chain_sum", CONFIG='{"max_terms": 3}')
    own = {"TASK": name, "MODEL": str(small_model), "ARTIFACTS": str(folder / "artifacts"), **TASKS[name][0]}
    return name, partial(make, cwd=checkout), SMALL | own


def only(variables: dict[str, str], pattern: str) -> Path:
    (path,) = Path(variables["ARTIFACTS"]).glob(pattern)
    return path


def test_data_probe_train_and_eval(task):
    name, make, variables = task
    result = make("data", **variables)
    assert result.returncode == 0, result.stdout
    assert "8 test, 4 dev, 16 train, 8 sft from generate" in result.stdout or name == "gym_sums", result.stdout
    manifest = json.loads(only(variables, f"data/{name}/manifest.json").read_text())
    assert (manifest["rows"]["train"], manifest["rows"]["test"]) == (16, 8)

    if name == "tool_calling":  # the longest prompts; the others' go the same way
        result = make("probe", **{**variables, "LIMIT": "8", "N": "4"})
        assert result.returncode == 0, result.stdout
        assert json.loads(only(variables, f"probe/{name}/*/probe.json").read_text())["prompts"] == 8

    result = make("train", STEPS="2", **variables)
    assert result.returncode == 0, result.stdout
    run = only(variables, f"runs/{name}/grpo-*")
    _, metrics, keys = TASKS[name]
    rows = [json.loads(line) for line in (run / "rollouts/1.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and all(-1 <= row["score"] <= 1 for row in rows)

    result = make("eval", LIMIT="8", **variables)
    assert result.returncode == 0, result.stdout
    for file in Path(variables["ARTIFACTS"]).glob(f"eval/{name}/*/summary.json"):
        summary = json.loads(file.read_text())
        assert summary["prompts"] == 8 and summary["errors"] == 0
        assert metrics | keys | {"accuracy", "pass@2", "score", "format"} <= summary["metrics"].keys()

    if name == "econ_agent":
        result = make("simulate", MONTHS="2", AGENTS="3", **variables)
        assert result.returncode == 0, result.stdout
        found = json.loads(only(variables, "eval/econ_agent/simulation-*/simulation.json").read_text())
        assert found["indicators"].keys() == {"base", "grpo", "rule"}
        assert (run / "checkpoints/global_step_2/actor/merged").is_dir()
    if name == "tool_calling":
        result = make("bfcl", **{**variables, "LIMIT": "2", "MAX_PROMPT_LENGTH": "3000"})
        assert result.returncode == 0, result.stdout
        assert "irrelevance" in result.stdout
