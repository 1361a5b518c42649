"""The trainings of `make experiment`: their settings, and how to run several at a time."""

import os
import queue
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tasks.common import settings
from tasks.common.launch.task import environment
from tasks.common.process import StageFailed, die_with_parent
from tasks.common.runs.folder import rl_dir
from tasks.common.settings import Command, Settings, SettingsError, load_settings


def planned(s: Settings, command: Command) -> dict[str, Settings]:
    """The settings of each training, by its label METHOD@RATE#SEED, in order. Raises SettingsError.

    All have the data and the warm-up of ``s``, and the smallest mini-batch of all the methods.
    """
    names = list(dict.fromkeys(filter(None, command.METHODS.split(","))))
    rates = [{"LR": rate} for rate in dict.fromkeys(filter(None, command.LRS.split(",")))] or [{}]
    chosen = [load_settings({**os.environ, "METHOD": name, **rate}) for name in names for rate in rates]
    if len(chosen) < 2:
        raise SettingsError(f"METHODS={command.METHODS}: name two or more, separated by commas, or several LRS")
    mini = min(each.MINI_BATCH_SIZE for each in chosen)
    runs = {}
    # Seeds outermost: an interrupted experiment has complete seeds.
    for seed in range(s.TRAIN_SEED, s.TRAIN_SEED + command.SEEDS):
        for each in chosen:
            name = f"{s.RUN}-{each.METHOD}-{each.LR:g}-{seed}" if s.RUN else ""
            run = replace(each, MINI_BATCH_SIZE=mini, TRAIN_SEED=seed, RUN=name)
            runs[f"{each.METHOD}@{each.LR:g}#{seed}"] = run
    return runs


def gpu_groups(s: Settings, jobs: int) -> list[list[str]]:
    """The visible GPUs in groups of N_GPUS, at most ``jobs``; one empty group where a training sees all of them."""
    groups = settings.gpu_groups(s.N_GPUS, jobs) if s.STACK != "cpu" else []
    return groups if len(groups) > 1 else [[]]


def train_at_once(runs: dict[str, Settings], arguments: list[str], jobs: int) -> str:
    """Train ``runs``, ``jobs`` at a time, each in its own process with its own log.

    They are spread over the groups of GPUs. Those of one group share its memory: each gets an equal part of
    GPU_MEMORY_UTILIZATION. Raises StageFailed after all have ended.
    """
    running: dict[str, subprocess.Popen] = {}
    groups = gpu_groups(next(iter(runs.values())), jobs)
    sharing = -(-jobs // len(groups))
    places: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for number in range(jobs):
        places.put(groups[number % len(groups)])

    def job(label: str) -> int:
        gpus = places.get_nowait()
        try:
            return train_on(label, gpus)
        finally:
            places.put(gpus)

    def train_on(label: str, gpus: list[str]) -> int:
        each = runs[label]
        log = rl_dir(each, arguments) / "job.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        share = replace(each, GPU_MEMORY_UTILIZATION=each.GPU_MEMORY_UTILIZATION / sharing)
        own = {"SHARED_GPU": str(sharing)} if sharing > 1 else {}  # verl_plugins/shared_gpu.py
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        command = [sys.executable, "-m", "tasks.common.launch.main", "one_of_many", *arguments]
        started = time.monotonic()
        print(f"  {label}: {log}", flush=True)
        with log.open("w") as output:
            running[label] = subprocess.Popen(
                command,
                env=environment(share) | own,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )
            code = running[label].wait()
        said = log.read_text(errors="replace").strip().rpartition("\n")[2].strip()
        print(f"  {label}: {said} ({time.monotonic() - started:.0f} s)", flush=True)
        return code

    with ThreadPoolExecutor(jobs) as pool:
        futures = {label: pool.submit(job, label) for label in runs}
        try:
            failed = [label for label, future in futures.items() if future.result()]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running.values():
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)  # each ends its own processes
            raise
    if failed:
        raise StageFailed(
            f"{len(failed)} of {len(runs)} trainings failed: {', '.join(failed)}; the same command continues"
        )
    return f"{len(runs)} trainings, {jobs} at a time"
