"""What several tests call: make, cookiecutter, and the environment that a train.sh exports."""

import contextlib
import ctypes
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import psutil

from tests.warm_python import EARLY
from verl_tasks.launch.names import refusal
from verl_tasks.models import find
from verl_tasks.settings import COMPLETE, STACKS, Command, Settings, SettingsError, load_settings, stack, values_of

ROOT = Path(__file__).resolve().parents[1]
# The tasks that ship, which README.md links: what a user adds to a clone has tests of its own.
TASKS = sorted(set(re.findall(r"\]\(tasks/(\w+)/README\.md\)", (ROOT / "README.md").read_text())))
MULTI_TURN = [task for task in TASKS if (ROOT / "tasks" / task / "environment.py").exists()]
SINGLE_TURN = [task for task in TASKS if task not in MULTI_TURN]
# The interpreter that runs the tests, so that a test never installs anything; in conftest.py's warm form.
PYTHON = os.environ.get("WARM_PYTHON", sys.executable)
MAKE = ["make", f"PYTHON={PYTHON}"]
# A training of the very small random model.
SMALL = {
    "TASK": "countdown",
    "STACK": "cpu",
    "TRAIN_SIZE": "16",
    "TEST_SIZE": "8",
    "DEV_SIZE": "4",
    "SFT_SIZE": "8",
    "SFT_STEPS": "2",
    "SFT_BATCH_SIZE": "4",
    "TRAIN_BATCH_SIZE": "4",
    "MINI_BATCH_SIZE": "4",
    "ROLLOUT_N": "4",
    "MAX_PROMPT_LENGTH": "256",  # a byte is a token
    "MAX_RESPONSE_LENGTH": "48",
    "N": "2",
    "SAVE_FREQ": "1",
}

# config.json of a model as its makers state it: https://huggingface.co/Qwen/Qwen2.5-3B/blob/main/config.json
QWEN25_3B = {
    "model_type": "qwen2",
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 11008,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def copy_of_checkout(folder: Path) -> Path:
    """The files of the working tree that git knows or would add, in ``folder``."""
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def stacks() -> list[str]:
    """The stacks for the verl of the Python that runs the tests; those of both: test_verl_generations.py."""
    return [name for name in STACKS if importlib.metadata.version("verl") == stack(name).VERL]


def exported(train_sh: Path, changes: dict[str, str]) -> dict[str, str]:
    """The environment that the scripts of a stage get of a task under ``changes``, on the cpu stack by default."""
    kept = ("PATH", "HOME", "TMPDIR", *EARLY)  # without those that the server started with, no fork (warm_python.py)
    clean = {k: v for k, v in outside_make().items() if k.startswith(kept)}
    given = {**clean, "STACK": "cpu", **changes, "TASK": train_sh.parent.name}
    with mock.patch("verl_tasks.settings.ROOT", train_sh.parents[2]):
        values = {name: value.text for name, value in values_of(given).items()}
    return given | stack(given["STACK"]).ENVIRONMENT | values | {COMPLETE: "1", "PYTHONPATH": str(train_sh.parents[2])}


def task_settings(task: str, changes: dict[str, str] | None = None) -> Settings:
    """The settings of ``task`` under ``changes``, as its scripts read them; on the cpu stack by default."""
    return load_settings(exported(ROOT / "tasks" / task / "train.sh", changes or {}))


def settings_of(target: str, variables: list[str]) -> Settings:
    """The settings of `make target VARIABLE=value ...`, which the task must take; those of a task that is to be
    written are countdown's."""
    given = dict(text.split("=", 1) for text in variables)  # the last counts, as make has it
    assert refusal([target], sorted(given)) == ""
    train_sh = ROOT / "tasks" / given.pop("TASK") / "train.sh"
    given["STAGE"] = "train" if target == "bench_training" else target
    environment = exported(train_sh if train_sh.exists() else ROOT / "tasks/countdown/train.sh", given)
    load_settings(environment, cls=Command)
    return load_settings(environment)


def with_embedded(artifacts: Path) -> Path:
    """``artifacts`` with the embedded model, which a command would unpack (ten seconds)."""
    with mock.patch.dict(os.environ, ARTIFACTS=str(artifacts)):
        find.embedded_model()
    return artifacts


def refused(goal: str, **variables: str) -> str:
    """The one-line error of `make GOAL`, without make and in this process."""
    import pytest

    from verl_tasks.launch import main
    from verl_tasks.rewards.answers import RewardError
    from verl_tasks.rows import DataError

    environment = exported(ROOT / "tasks" / variables["TASK"] / "train.sh", {"STARTED": "0"} | variables)
    kinds = (SettingsError, DataError, RewardError)
    with pytest.raises(kinds) as said, mock.patch.dict(os.environ, environment, clear=True):
        main.main(goal, shlex.split(variables.get("ARGS", "")))
    (line,) = str(said.value).splitlines()
    return line


# What make put into the environment, and what pytest was called with.
OURS = ("PYTHON", "GIVEN", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "STACK", "STARTED", "PYTEST_ADDOPTS")


def outside_make() -> dict[str, str]:
    """The environment without what the make that runs the tests put into it."""
    return {k: v for k, v in os.environ.items() if k not in OURS}


def make(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    """Run make; standard output and error in one text."""
    return subprocess.run(
        [*MAKE, *arguments, *(f"{k}={v}" for k, v in variables.items())],
        cwd=cwd,
        env=outside_make(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def error_line(failed: subprocess.CompletedProcess) -> str:
    """The only error of a command, in one line, for a person."""
    assert failed.returncode and "\nTraceback" not in failed.stdout, failed.stdout
    (line,) = [line for line in failed.stdout.splitlines() if line.startswith("error: ")]
    return line


# Of a process in which verl has the platform of the cpu stack.
OUR_PLATFORM = {
    "PYTHONPATH": str(ROOT),
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_tasks.verl_plugins.cpu.verl_platform",
}


def on_our_platform(program: str, *arguments: str) -> dict:
    """The JSON that the Python ``program`` prints last."""
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, env=os.environ | OUR_PLATFORM, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def by_torchrun(module: str, folder: Path) -> list[dict]:
    """What a program with ``sequence_parallel.write_found`` found on a CPU, of each of its two processes."""
    environment = os.environ | OUR_PLATFORM | {"OMP_NUM_THREADS": "1"}
    environment["VERL_USE_EXTERNAL_MODULES"] += ",verl_tasks.verl_plugins.patches"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *torchrun, "-m", module, str(folder)]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or dead and not yet noticed by its parent."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(found: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until ``found()``; AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def write_shards(part: Path, ranks: int = 1) -> None:
    """The files of verl's FSDP checkpoint ``part`` (actor), as archives with nothing in them."""
    part.mkdir(parents=True, exist_ok=True)
    for kind in ("model", "optim", "extra_state"):
        for rank in range(ranks):
            zipfile.ZipFile(part / f"{kind}_world_size_{ranks}_rank_{rank}.pt", "w").close()


def write_checkpoint(folder: Path, ranks: int = 1) -> None:
    """A whole checkpoint of verl's RL trainer as ``folder``, without weights."""
    write_shards(folder / "actor", ranks)
    zipfile.ZipFile(folder / "data.pt", "w").close()


def steps_logged(folder: Path) -> list[int]:
    """Steps in the metrics of the run in ``folder``, of all its launches; a half-written line does not count."""
    lines = [line for file in sorted((folder / "metrics").glob("*")) for line in file.read_text().splitlines(True)]
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def kill_after_a_checkpoint(goal: str, run: str, cwd: Path = ROOT, **variables: str) -> int:
    """Run make and end it with SIGKILL once ``run`` (a pattern) has a checkpoint; its step is returned.

    verl logs a step's metrics after its checkpoint: the kill waits for both, or the step's metrics would be lost.
    """
    artifacts = Path(variables["ARTIFACTS"])

    def saved() -> list[int]:
        """The step of the run's last checkpoint, once its metrics are written."""
        trackers = artifacts.glob(f"{run}/checkpoints/latest_checkpointed_iteration.txt")
        return [
            step
            for file in trackers
            for step in map(int, file.read_text().split())
            if step in steps_logged(file.parents[1])
        ]

    with tempfile.TemporaryFile("w+") as output:
        killed = subprocess.Popen(
            [*MAKE, goal, *(f"{k}={v}" for k, v in variables.items())],
            cwd=cwd,
            env=outside_make(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM),  # PR_SET_PDEATHSIG: also where the tests end
        )
        deadline = time.monotonic() + 900
        try:
            while not saved():
                if killed.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise AssertionError("ended before its first checkpoint:\n" + output.read())
                time.sleep(0.2)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(killed.pid, signal.SIGKILL)
            killed.wait()
    deadline = time.monotonic() + 30  # for the keeper (tasks/common/leftovers.py)
    while str(artifacts) in our_processes() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert str(artifacts) not in our_processes()
    (step,) = saved()
    return step


def checkout_with(task: str, folder: Path, **answers: str) -> Path:
    """A copy of the checkout with a new task, for tests that change it: those that run meanwhile do not see it."""
    checkout = copy_of_checkout(folder / "checkout")
    result = make("new", TASK=task, cwd=checkout, **answers)
    assert result.returncode == 0, result.stdout
    return checkout


def cookiecutter(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run cookiecutter's command as a user does."""
    return subprocess.run(
        [PYTHON, "-m", "cookiecutter", *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def change_reward(task: Path, body: str) -> None:
    """Let ``body`` score all but the ground truth of examples.jsonl, which is checked before the training."""
    reward = (task / "reward.py").read_text()
    first = "    answer, truth = math_answer.find_answer("
    assert first in reward
    (task / "reward.py").write_text(reward.replace(first, f"    if ground_truth != '12':\n        {body}\n{first}"))


def our_processes() -> str:
    return subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
