"""Small trainings of the task `digits` (conftest.py) by every method, and what they left."""

import json
import math
from pathlib import Path

from tests.helpers import SMALL
from verl_tasks.models.merge import merge
from verl_tasks.runs.run import Run, recorded

TASK = "digits"
COMMON = SMALL | {
    "TASK": TASK,
    "INIT": "base",
    "STEPS": "2",
    "MINI_BATCH_SIZE": "2",
    "TRAIN_SIZE": "64",
    "SAMPLED_PROMPTS": "0",  # most responses of a random model are cut, and make no chosen one
    "KL_COEF": "0.01",
    "MAX_PROMPT_LENGTH": "384",
}


def runs_of(variables, method: str) -> list[Path]:
    """The runs of a method, the newest last."""
    found = (Path(variables["ARTIFACTS"]) / "runs" / TASK).glob(f"{method}-*/settings.json")
    return [file.parent for file in sorted(found, key=lambda file: file.stat().st_mtime)]


def metrics_of(run: Path) -> dict[int, dict]:
    lines = [line for file in sorted((run / "metrics").glob("*.jsonl")) for line in file.read_text().splitlines()]
    return {record["step"]: record["data"] for record in map(json.loads, lines)}


def trained_parameters(variables, run: Path) -> set[str]:
    """Names of the parameters in which the last checkpoint differs from MODEL; all of it must be finite."""
    import torch
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(merge((trained_run := Run.read(run)).checkpoint(), trained_run.base))
    start = AutoModelForCausalLM.from_pretrained(variables["MODEL"])
    assert all(torch.isfinite(p).all() for p in trained.parameters())
    named = trained.named_parameters()
    return {name for name, p in named if not torch.equal(p.float(), start.get_parameter(name).float())}


def check_run(variables, method: str, rank: int) -> Path:
    run = runs_of(variables, method)[-1]
    metrics = metrics_of(run)
    steps = recorded(run)["settings"]["STEPS"]
    assert sorted(metrics) == list(range(1, steps + 1)) and (steps == 2 or method == "dpo")
    losses = {"dpo": ["train/loss"], "ppo": ["critic/vf_loss"]}.get(method, ["actor/pg_loss"])
    for number, step in metrics.items():
        assert all(math.isfinite(value) for value in step.values() if isinstance(value, float))
        assert set(losses) <= step.keys()
        # PPO's first step is the critic's warm-up on the cpu stack.
        assert ("actor/pg_loss" in step) == (method != "dpo" and (method, number) != ("ppo", 1))
        assert ("rollout_corr/rollout_is_mean" in step) == (method != "dpo")
    changed = trained_parameters(variables, run)
    assert changed
    assert bool(rank) == all("_proj" in name for name in changed)
    return run
