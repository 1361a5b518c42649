"""How long the stages of a training will take: as long as the last time here with the same task and sizes."""

import functools
import os
import time
from collections.abc import Callable

from verl_tasks.files import read_json, write_json
from verl_tasks.runs import folder
from verl_tasks.runs.run import whole_steps
from verl_tasks.settings import Settings, fingerprint

# Settings that decide the time of a stage: these words, and all whole numbers but the following. How long responses are
# within their limit changes while a policy learns.
WORDS = ("STACK", "MODEL", "TEACHER", "METHOD", "INIT", "SFT_SOURCE", "DIFFICULTY")
NO_TIME = ("SEED", "TRAIN_SEED", "EVAL_SEED", "KEEP", "PATIENCE", "WANDB")


def sizes_of(s: Settings) -> str:
    """A digest of what decides the time of a training's stages on this machine."""
    values = vars(s).items()
    sizes = {name: value for name, value in values if type(value) is int and name not in NO_TIME}
    return fingerprint(sizes | {name: getattr(s, name) for name in WORDS} | {"cores": os.cpu_count()})


def kept(s: Settings, arguments: list[str], stages: dict[str, Callable[[], str]]) -> dict[str, Callable[[], str]]:
    """``stages`` that keep their seconds for the next time. Prints what those to come took the last time.

    A stage that goes on with work that is there already says nothing of the whole, and so is left out of both."""
    started = any(run.steps for run in folder.rounds(s, arguments))
    begun = {"sft": bool(whole_steps(folder.sft_dir(s))), "train": started, "eval": started}
    anew = {name: stage for name, stage in stages.items() if begun.get(name) is False}
    file, sizes = s.runs_dir / ".minutes.json", sizes_of(s)
    took = {name: seconds for name, seconds in read_json(file).get(sizes, {}).items() if name in anew}
    if took:
        each = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in took.items())
        print(f"about {sum(took.values()) / 60:.1f} minutes, as the last time with these sizes: {each}", flush=True)

    def timed(name: str) -> str:
        begins = time.monotonic()
        said = anew[name]()
        known = read_json(file)
        took = known.get(sizes, {}) | {name: round(time.monotonic() - begins, 1)}
        write_json(file, known | {sizes: took})
        return said

    return stages | {name: functools.partial(timed, name) for name in anew}
