"""The stages: what `make STAGE TASK=...` does. launch/main.py runs them, the Makefile and `make help` list them.

A program tasks/TASK/STAGE.py is a stage of that task besides.
"""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """A stage, and what settings, checks and files need to know of it."""

    group: str  # its title in `make help`; empty: of one task
    help: str
    parts: tuple[str, ...] = ()  # what it runs, in order; empty: the stage alone, which takes no lock
    gpu: bool = False  # uses a GPU
    plans: bool = False  # its settings are a training's: batches must fit the GPUs
    trains: bool = False  # by RL or DPO
    evaluates: bool = False  # TEMPERATURE is of its samples
    verl: bool = False  # needs the stack's verl
    about_a_run: bool = False  # of a run's checkpoint, or of MODEL
    episodes: bool = True  # also for multi-turn tasks
    defaults: dict[str, str] = field(default_factory=dict)  # override the task's
    writes: tuple[str, ...] = ()  # folders under artifacts/, with one for each task


_TRAINING = {"gpu": True, "plans": True, "verl": True}
_RL = _TRAINING | {"trains": True, "parts": ("data", "model", "sft", "train", "eval")}
_MODEL = {"gpu": True, "evaluates": True, "about_a_run": True}
_ALL = ("data", "model", "sft", "train", "merge", "eval", "compare")
_EVERY_DAY, _BEFORE, _TRAINS, _AFTER = "Every day", "Before a training", "Training", "After a training"
_REPOSITORY = "This repository"

# The Makefile reads the names from the beginnings of these lines.
STAGES = {
    "settings": Stage(_EVERY_DAY, "show every variable of TASK: its value, where it comes from, and its help"),
    "doctor": Stage(
        _EVERY_DAY,
        "check this machine, the settings and the data before a training, and say what to do",
        gpu=True,
        plans=True,
    ),
    "train": Stage(
        _EVERY_DAY,
        "run data, model, SFT warm-up, RL, evaluation and closing table; FROM=train starts at that stage",
        **_RL,
        writes=("runs", "samples"),
    ),
    "eval": Stage(
        _EVERY_DAY,
        "evaluate MODEL; without it the base model, the warm-up and the trained model",
        ("data", "model", "eval"),
        **_MODEL,
        writes=("eval",),
    ),
    "compare": Stage(
        _EVERY_DAY,
        "compare BASE with MODEL or the trained model: paired tests, prompts gained and lost",
        ("data", "model", "compare"),
        **_MODEL,
        writes=("compare",),
    ),
    "chat": Stage(_EVERY_DAY, "talk to MODEL, or to the trained model", ("data", "model"), **_MODEL, writes=("chat",)),
    "data": Stage(_BEFORE, "prepare the task's data", ("data",), plans=True, writes=("data",)),
    "attack": Stage(
        _BEFORE,
        "search SECONDS=120 for wrong answers that earn reward; fails if it finds some",
        ("data", "attack"),
        gpu=True,
        plans=True,
        writes=("attack",),
    ),
    "rehearse": Stage(
        _BEFORE,
        "play the planned GPU run on this CPU with a thin model; say what would break, and its memory",
        plans=True,
        writes=("rehearse",),
    ),
    "probe": Stage(
        _BEFORE,
        "sample MODEL on the data: do the rewards of a prompt differ? FILTER=1 drops prompts where not",
        ("data", "model", "probe"),
        gpu=True,
        evaluates=True,
        defaults={"N": "16", "LIMIT": "256"},  # more samples of fewer prompts
        writes=("probe",),
    ),
    "certify": Stage(
        _BEFORE,
        "prove on a CPU that MODEL is trained on the tokens it samples: template, mask, stop tokens, log-probs",
        ("data", "model", "certify"),
        plans=True,
        verl=True,
        defaults={"LIMIT": "4"},
        writes=("certify",),
    ),
    "sft": Stage(_BEFORE, "run the SFT warm-up on the task's demonstrations", ("data", "model", "sft"), **_TRAINING),
    "config": Stage(
        _BEFORE, "print the training's plan and verl's resolved config, and train nothing", plans=True, verl=True
    ),
    "dpo": Stage(
        _TRAINS,
        "like train, with DPO on the pairs of PAIRS_FILE or of the policy's own samples",
        **_RL,
        episodes=False,
        defaults={"METHOD": "dpo"},
    ),
    "all": Stage(_TRAINS, "train, then merge and compare", **_RL | {"parts": _ALL}),
    "experiment": Stage(
        _TRAINS,
        "train with METHODS=grpo,gspo SEEDS=3 LRS=1e-6,3e-6 on the same data, and compare the results",
        **_RL | {"parts": ("data", "model", "sft")},  # and the trainings that METHODS, SEEDS and LRS name
        writes=("experiments",),
    ),
    "merge": Stage(
        _AFTER, "save the checkpoint STEP as one folder that vLLM and transformers load", ("merge",), about_a_run=True
    ),
    "batch": Stage(
        _AFTER,
        "answer the prompts of INPUT with MODEL or the trained model, and write OUTPUT",
        ("data", "model"),
        **_MODEL,
        defaults={"N": "1"},
        writes=("batch",),
    ),
    "serve": Stage(
        _AFTER,
        'serve MODEL or the trained model to OpenAI clients on PORT=8000; ARGS="--tool-call-parser hermes"',
        ("model",),
        **_MODEL,
        writes=("serve",),
    ),
    "export": Stage(
        _AFTER,
        "write the trained model and its model card to OUTPUT, for the hub; PUSH=owner/name uploads it",
        ("export",),
        about_a_run=True,
    ),
    "rescore": Stage(_AFTER, "score stored ROLLOUTS again, without a model", episodes=False),
    "bench_training": Stage(
        _REPOSITORY,
        'time a GRPO step with our settings, those of verl\'s example, and naive ones; ARGS="--help"',
        ("data",),
        gpu=True,
        plans=True,
    ),
}

_OF_A_TASK = Stage("", "", ("data", "model"), about_a_run=True)


def stage_of(name: str) -> Stage:
    """The stage ``name``; one of a task's own where it is not in the table."""
    return STAGES.get(name, _OF_A_TASK)


def own_stages(task_dir: Path) -> list[str]:
    """The task's own stages: its programs tasks/TASK/STAGE.py."""
    files = [path for path in task_dir.glob("*.py") if path.stem not in ("prepare_data", "evaluate")]
    return sorted(path.stem for path in files if '\nif __name__ == "__main__":' in path.read_text())
