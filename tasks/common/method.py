"""What a method says of itself: the names that a module tasks/common/training/methods/METHOD.py may define."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

FOLDER = Path(__file__).parent / "training/methods"
METHODS = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


@dataclass(frozen=True)
class Method:
    """A method, and what holds where its module does not say otherwise."""

    overrides: Callable[..., list[str]] = lambda s: []  # of settings: its keys in verl's config
    DEFAULTS: dict[str, str] = field(default_factory=dict)  # of variables
    BATCH_SIZE: int = 128  # default of TRAIN_BATCH_SIZE where the stack has none
    MINI_BATCHES: int = 1  # optimizer steps of a training step
    TRAINER: str = "verl_tasks.verl_plugins.trainer"  # verl's trainer of it
    MODE: str = "task"  # the name by which verl knows that trainer
    GPUS: int = 0  # that it takes beside N_GPUS
    PAIRS: bool = False  # learns from pairs with TRL: samples nothing in training, and the pairs make its steps
    REWARD: bool = True  # learns from the task's reward
    EPISODES: bool = True  # can train multi-turn tasks
    ASYNC: bool = True  # can learn from samples of an older policy
    # Why it cannot train, in one line each: of settings, of verl's config, and of that and the models' files.
    # Where TRL trains, problem and warning get the settings in place of a config.
    refusals: Callable[..., Iterable[str]] = lambda s: ()
    problem: Callable[..., str | None] = lambda config: None
    models_problem: Callable[..., str | None] = lambda config: None
    warning: Callable[..., str | None] = lambda config: None  # before a training
    warning_after: Callable[..., str | None] = lambda metrics: None


def method(name: str) -> Method:
    """The method ``name``, one of METHODS."""
    module = importlib.import_module(f"verl_tasks.training.methods.{name}")
    return Method(**{f.name: getattr(module, f.name) for f in fields(Method) if hasattr(module, f.name)})
