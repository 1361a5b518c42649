"""How long the stages of a training will take: as the last time here with the same task and sizes, else by timed
passes (passes.py)."""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable

from verl_tasks.files import read_json, write_json
from verl_tasks.launch.task import exported
from verl_tasks.models.find import resolve_model
from verl_tasks.process import die_with_parent
from verl_tasks.runs import folder
from verl_tasks.runs.run import Run
from verl_tasks.settings import Settings, fingerprint

# Settings that decide the time of a stage: these words, and all whole numbers but the following. How long responses are
# within their limit changes while a policy learns.
WORDS = ("STACK", "MODEL", "TEACHER", "METHOD", "INIT", "SFT_SOURCE", "DIFFICULTY", "ASYNC")
NO_TIME = ("SEED", "TRAIN_SEED", "EVAL_SEED", "KEEP", "PATIENCE", "WANDB")
SHORT = 16384  # tokens that RL may sample: of fewer, the engines' start is most of the time


def sizes_of(s: Settings) -> str:
    """A digest of what decides the time of a training's stages on this machine."""
    values = vars(s).items()
    sizes = {name: value for name, value in values if type(value) is int and name not in NO_TIME}
    return fingerprint(sizes | {name: getattr(s, name) for name in WORDS} | {"cores": os.cpu_count()})


def timed(s: Settings) -> dict[str, float]:
    """Seconds by stage, from timed passes of MODEL; empty where they were never compared with a training (on a GPU,
    with pairs, a critic or other models, sampling beside the update), and of a short one."""
    others = (
        s.sampling_gpus
        or s.by_pairs
        or s.TEACHER
        or s.REWARD_MODEL
        or s.METHOD in ("ppo", "dapo")
        or s.SFT_SOURCE == "samples"
    )
    if s.STACK != "cpu" or others or s.STEPS * s.TRAIN_BATCH_SIZE * s.ROLLOUT_N * s.MAX_RESPONSE_LENGTH < SHORT:
        return {}
    file = s.runs_dir / ".passes.json"
    command = [sys.executable, "-m", "verl_tasks.launch.passes", resolve_model(s.MODEL), str(file)]
    done = subprocess.run(command, env=exported(s), capture_output=True, text=True, preexec_fn=die_with_parent)
    if done.returncode:  # the training itself will say what is wrong
        return {}
    return read_json(file)["seconds"]


def told(s: Settings, anew: set[str]) -> dict[str, float]:
    """Seconds of the stages ``anew``, as far as they are known. Prints them."""
    took = read_json(s.runs_dir / ".minutes.json").get(sizes_of(s), {})
    how = "as the last time with these sizes"
    if anew - took.keys():
        took, how = timed(s) | took, "by timed passes"
    took = {name: took[name] for name in ("sft", "train", "eval") if name in anew & took.keys()}
    most = "at most " if s.SFT_LOSS and how.startswith("by") else ""  # the loss may end it before
    each = ", ".join(f"{name} {most * (name == 'sft')}{seconds / 60:.1f}" for name, seconds in took.items())
    if took:
        print(f"  about {sum(took.values()) / 60:.1f} minutes, {how}: {each}", flush=True)
    return took


def kept(
    s: Settings, arguments: list[str], stages: dict[str, Callable[[], str]], expected: dict[str, float]
) -> dict[str, Callable[[], str]]:
    """``stages`` that keep their seconds for the next time. Before the first of those that train, ``expected`` gets the
    seconds of those to come.

    A stage that goes on with work that is there already says nothing of the whole, and so is left out of both."""
    started = any(run.steps for run in folder.rounds(s, arguments))
    begun = {"sft": bool(Run.read(folder.sft_dir(s)).steps), "train": started, "eval": started}
    anew = {name: stage for name, stage in stages.items() if begun.get(name) is False}
    file, sizes = s.runs_dir / ".minutes.json", sizes_of(s)

    @functools.cache
    def tell() -> None:
        expected.update(told(s, {*anew}))

    def measured(name: str) -> str:
        tell()
        begins = time.monotonic()
        said = anew[name]()
        known = read_json(file)
        took = known.get(sizes, {}) | {name: round(time.monotonic() - begins, 1)}
        write_json(file, known | {sizes: took})
        return said

    return stages | {name: functools.partial(measured, name) for name in anew}
