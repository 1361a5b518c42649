"""A task's own parts, from its folder: its scripts, its reward, the defaults of its train.sh."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict

from verl_tasks.errors import said
from verl_tasks.leftovers import Interrupts
from verl_tasks.machine.cluster import OWN_RAY
from verl_tasks.process import StageFailed, die_with_parent
from verl_tasks.rewards import container
from verl_tasks.rewards.answers import RewardError, is_checked, variants
from verl_tasks.rewards.environment import of_task
from verl_tasks.settings import COMPLETE, Settings, SettingsError, stack
from verl_tasks.visible_gpus import gpu_numbers


def script(s: Settings, name: str, *arguments: str) -> None:
    """Run a script of the task with the settings ``s``. If it fails, exits with its code: it has printed the reason."""
    command = [sys.executable, str(s.task_dir / name), *arguments]
    with subprocess.Popen(command, env=exported(s), preexec_fn=die_with_parent) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # a terminal has sent it already
            with Interrupts() as interrupts, interrupts.held():  # its clean-up may take long
                process.wait()
            raise
    if code < 0:
        raise StageFailed(f"{s.task_dir / name} was ended by signal {-code} (9 may mean: out of memory)")
    if code:
        sys.exit(code)


def exported(s: Settings) -> dict[str, str]:
    """This process's environment with the value of every variable, so that a script reads no defaults."""
    own = {name: value for name, value in os.environ.items() if name != "GIVEN"} | {COMPLETE: "1"}
    # Some environments of reasoning-gym draw from sets: the same data again needs the same hashes.
    return own | {name: str(value) for name, value in asdict(s).items()} | {"PYTHONHASHSEED": "0"}


def stack_environment(s: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of verl, vLLM and Ray on this stack; they listen on this machine only, unless on a cluster. GPUs
    have numbers in it.

    A value in ``environ`` stays; its modules are loaded after the stack's.
    """
    ours = stack(s.STACK).ENVIRONMENT | ({} if environ.get("RAY_ADDRESS") else OWN_RAY)
    own = {name: environ.get(name) or value for name, value in ours.items()} | gpu_numbers()
    name = "VERL_USE_EXTERNAL_MODULES"
    modules = [*stack(s.STACK).ENVIRONMENT[name].split(","), *environ.get(name, "").split(",")]
    return own | {name: ",".join(dict.fromkeys(filter(None, modules)))}


def load_reward(s: Settings) -> Callable:
    """What makes the task's rewards: ``compute_score``, or its Environment. Raises as ``compute_score_of``, and where
    AGENT_IMAGE cannot be used."""
    found = of_task(s.TASK) if s.multi_turn else compute_score_of(s)
    if s.AGENT_IMAGE:
        if not getattr(found, "contained", False):
            why = f"no program plays TASK={s.TASK}, so nothing would run in a container; leave it out"
            raise SettingsError(f"AGENT_IMAGE={s.AGENT_IMAGE}: {why}")
        container.runtime_of(s.AGENT_IMAGE)
    return found


def compute_score_of(s: Settings) -> Callable[..., dict]:
    """The task's reward. Raises RewardError when it cannot be loaded or nothing checks what it returns, SettingsError
    when it has no variant REWARD."""
    try:
        compute_score = importlib.import_module(f"tasks.{s.TASK}.reward").compute_score
    except Exception as error:
        raise RewardError(f"{s.task_dir}/reward.py: cannot be loaded: {said(error)}") from error
    if not is_checked(compute_score):
        fix = "write @reward_function above it (from verl_tasks import reward_function), which refuses a broken score"
        raise RewardError(f"{s.task_dir}/reward.py: compute_score has no decorator; {fix}")
    if s.REWARD and s.REWARD not in variants(compute_score):
        known = ", ".join(variants(compute_score)) or "none: it has one reward"
        raise SettingsError(f"REWARD={s.REWARD}: TASK={s.TASK} knows {known}")
    return compute_score
