"""The trainings of `make experiment`: their settings, and how to run several at a time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verl_tasks import settings, visible_gpus
from verl_tasks.launch.task import exported
from verl_tasks.process import StageFailed, die_with_parent
from verl_tasks.runs.folder import rl_run
from verl_tasks.settings import Command, Settings, SettingsError, load_settings

POLL_SECONDS = 0.2
CORES = 5  # of each training on GPUs: with fewer they wait for one another (docs/GPU.md)


def planned(s: Settings, command: Command) -> dict[str, Settings]:
    """The settings of each training, by its label METHOD@RATE#SEED, in order. Raises SettingsError.

    All have the data and the warm-up of ``s``, and the smallest mini-batch of all the methods that have rollouts.
    """
    names = list(dict.fromkeys(filter(None, command.METHODS.split(","))))
    rates = [{"LR": rate} for rate in filter(None, command.LRS.split(","))] or [{}]
    others = {"TEACHER": ""} if "distill" in names else {}
    given = {name: os.environ | {"METHOD": name} | ({} if name == "distill" else others) for name in names}
    chosen = [load_settings(given[name] | rate) for name in names for rate in rates]
    if len(named := {f"{each.METHOD} {each.LR:g}" for each in chosen}) < 2:
        raise SettingsError(f"METHODS={command.METHODS}: name two or more, separated by commas, or several LRS")
    if len(named) < len(chosen):
        raise SettingsError(f"LRS={command.LRS}: two of them are the same rate; leave one out")
    mini = min((each.MINI_BATCH_SIZE for each in chosen if not each.by_pairs), default=0)
    runs = {}
    # Seeds outermost: an interrupted experiment has complete seeds.
    for seed in range(s.TRAIN_SEED, s.TRAIN_SEED + command.SEEDS):
        for each in chosen:
            name = f"{s.RUN}-{each.METHOD}-{each.LR:g}-{seed}" if s.RUN else ""
            own = each.MINI_BATCH_SIZE if each.by_pairs else mini
            run = replace(each, MINI_BATCH_SIZE=own, TRAIN_SEED=seed, RUN=name)
            runs[f"{each.METHOD}@{each.LR:g}#{seed}"] = run
    return runs


def gpu_groups(runs: Sequence[Settings], jobs: int) -> list[list[str]]:
    """The visible GPUs in groups, at most ``jobs``, each for any of ``runs``: of N_GPUS, and those of a teacher.

    One empty group where a training sees all of them.
    """
    s = runs[0]
    groups = visible_gpus.gpu_groups(s.N_GPUS + settings.teacher_gpus(runs), jobs) if s.STACK != "cpu" else []
    return groups if len(groups) > 1 else [[]]


def sharing(jobs: int, groups: int) -> int:
    """How many of ``jobs`` trainings share one of so many groups of GPUs, at most."""
    return -(-jobs // groups)


def few_cores(runs: dict[str, Settings], jobs: int) -> str:
    """A warning where ``runs``, ``jobs`` at a time, have too few cores; else empty."""
    cores, at_once = len(os.sched_getaffinity(0)), min(jobs, len(runs))
    if at_once == 1 or at_once * CORES <= cores or next(iter(runs.values())).STACK == "cpu":
        return ""
    few = f"JOBS={jobs} on {cores} cores: fewer than {CORES} for each training, which wait for one another"
    return f"{few}; JOBS={max(1, cores // CORES)} does more steps in all"


def train_at_once(runs: dict[str, Settings], arguments: list[str], jobs: int) -> str:
    """Train ``runs``, ``jobs`` at a time, each in its own process with its own log.

    They are spread over the groups of GPUs. Those of one group share its memory: each gets an equal part of
    GPU_MEMORY_UTILIZATION. Raises StageFailed after all have ended.
    """
    jobs = min(jobs, len(runs))
    groups = gpu_groups([*runs.values()], jobs)
    free, shared = [groups[number % len(groups)] for number in range(jobs)], sharing(jobs, len(groups))
    waiting, running, failed = list(runs), {}, []
    try:
        while waiting or running:
            while waiting and free:
                label, gpus = waiting.pop(0), free.pop(0)
                log = rl_run(runs[label], arguments).folder / "job.log"
                print(f"  {label}: {log}", flush=True)
                running[label] = _started(runs[label], arguments, log, gpus, shared), log, gpus, time.monotonic()
            time.sleep(POLL_SECONDS)
            for label in [label for label, (process, *_) in running.items() if process.poll() is not None]:
                process, log, gpus, started = running.pop(label)
                free.append(gpus)
                failed += [label] if process.returncode else []
                *_, last = lines = log.read_text(errors="replace").strip().split("\n")
                said = next((line for line in lines if process.returncode and line.startswith("error: ")), last).strip()
                print(f"  {label}: {said} ({time.monotonic() - started:.0f} s)", flush=True)
    except BaseException:
        for process, *_ in running.values():
            process.send_signal(signal.SIGINT)  # each ends its own processes
        for process, *_ in running.values():
            process.wait()
        raise
    if failed:
        which = ", ".join(label for label in runs if label in failed)
        raise StageFailed(f"{len(failed)} of {len(runs)} trainings failed: {which}; the same command continues")
    return f"{len(runs)} trainings, {jobs} at a time"


def _started(s: Settings, arguments: list[str], log: Path, gpus: list[str], shared: int) -> subprocess.Popen:
    """A training on ``gpus`` (empty: all that are visible), one of ``shared`` there."""
    log.parent.mkdir(parents=True, exist_ok=True)
    own = {"SHARED_GPU": str(shared)} if shared > 1 else {}  # verl_plugins/shared_gpu.py
    own |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    share = replace(s, GPU_MEMORY_UTILIZATION=s.GPU_MEMORY_UTILIZATION / shared)
    command, env = [sys.executable, "-m", "verl_tasks.launch.rounds"], exported(share) | own
    with log.open("w") as output:
        return subprocess.Popen(
            [*command, *arguments], env=env, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
