"""A task's own parts, from its folder: its scripts, its reward, the defaults of its train.sh."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict

from tasks.common.process import StageFailed, die_with_parent
from tasks.common.rewards.answers import RewardError, variants
from tasks.common.settings import Settings, SettingsError


def script(s: Settings, name: str, *arguments: str) -> None:
    """Run a script of the task, with the settings as they are now. Exits as it exits: it has said why."""
    command = [sys.executable, str(s.task_dir / name), *arguments]
    with subprocess.Popen(command, env=environment(s), preexec_fn=die_with_parent) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # of a terminal it has had it already, and is ending
            process.wait()
            raise
    if code < 0:
        raise StageFailed(f"{s.task_dir / name} was ended by signal {-code} (9 may mean: out of memory)")
    if code:
        sys.exit(code)


def environment(s: Settings) -> dict[str, str]:
    """This process's environment with the settings as they are now."""
    # Some environments of reasoning-gym draw from sets: the same data again needs the same hashes.
    return os.environ | {name: str(value) for name, value in asdict(s).items()} | {"PYTHONHASHSEED": "0"}


def default_model(s: Settings) -> str:
    """The MODEL that the task's train.sh has when none is given."""
    clean = {name: value for name, value in os.environ.items() if name != "MODEL"} | {"STAGE": "default_model"}
    command = ["bash", str(s.task_dir / "train.sh")]
    return subprocess.run(command, env=clean, capture_output=True, text=True, check=True).stdout.strip()


def compute_score_of(s: Settings) -> Callable[..., dict]:
    """The task's reward. Raises RewardError when it cannot be loaded, SettingsError when it has no variant REWARD."""
    try:
        compute_score = importlib.import_module(f"tasks.{s.TASK}.reward").compute_score
    except Exception as error:
        raise RewardError(f"{s.task_dir}/reward.py: cannot be loaded: {type(error).__name__}: {error}") from error
    if s.REWARD and s.REWARD not in variants(compute_score):
        known = ", ".join(variants(compute_score)) or "none: it has one reward"
        raise SettingsError(f"REWARD={s.REWARD}: TASK={s.TASK} knows {known}")
    return compute_score
