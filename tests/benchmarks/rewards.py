"""Rows a second of every task's reward, and of the scorers of verl, reasoning-gym and math-verify on the same rows.

    make bench_rewards [ARGS="--rows 2000 --out docs/results/rewards.json"]

Rows are a task's own: for each training prompt its demonstration (right), another prompt's (wrong), and its own cut in
half (broken). A reward is measured as verl calls it, with the ground truth as JSON text; the scorers beside it get the
same responses. p99 is held against 5 ms a row.
"""

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import reasoning_gym
from math_verify import parse, verify
from verl.utils.reward_score import gsm8k as verl_gsm8k

from tests.helpers import ROOT, task_settings
from verl_tasks.files import write_json
from verl_tasks.rewards import gym
from verl_tasks.rewards.answers import last_answer, read_ground_truth
from verl_tasks.rows import Example
from verl_tasks.settings import given_arguments

LIMIT_MS = 5.0
# Of reasoning-gym's: a short expression, a number, a text, and a grid whose scorer evaluates the answer.
ENVIRONMENTS = ("countdown", "basic_arithmetic", "word_sorting", "spiral_matrix")

Row = tuple[str, str]  # response, ground truth as verl has it
Scorer = Callable[[str, str], object]


def rows_of(examples: list[Example]) -> list[Row]:
    """Three responses to each example: its demonstration, that of the next one, and its own cut in half."""
    rows = []
    for example, following in zip(examples, examples[1:] + examples[:1], strict=True):
        truth = example.ground_truth if isinstance(example.ground_truth, str) else json.dumps(example.ground_truth)
        right, wrong = example.demonstration, following.demonstration
        rows += [(response, truth) for response in (right, wrong, right[: len(right) // 2])]
    return rows


def task_rows(task: str, count: int) -> list[Row]:
    """``count`` rows of the problems that ``task`` makes itself."""
    module = importlib.import_module(f"tasks.{task}.prepare_data")
    settings = task_settings(task, {"N_GPUS": "1"})
    made = (e for e in module.generate(settings) if e and e.demonstration)
    return rows_of(list(islice(made, max(2, count // 3))))


def measure(scorer: Scorer, rows: list[Row]) -> dict[str, float]:
    """Rows a second, and quantiles of the wall time of a row in ms. What is started once is started before."""
    for response, truth in rows[:6]:
        scorer(response, truth)
    times = []
    for response, truth in rows:
        start = time.perf_counter()
        scorer(response, truth)
        times.append(time.perf_counter() - start)
    return {
        "rows": len(rows),
        "rows_per_second": len(times) / sum(times),
        "p50_ms": 1e3 * statistics.median(times),
        "p99_ms": 1e3 * statistics.quantiles(times, n=100)[98],
        "max_ms": 1e3 * max(times),
    }


def peers(task: str) -> dict[str, Scorer]:
    """Other scorers of the same rows."""
    if task == "gsm8k":
        return {
            "verl (gsm8k.py, strict)": lambda response, truth: verl_gsm8k.compute_score(response, truth, "strict"),
            "verl (gsm8k.py, flexible)": lambda response, truth: verl_gsm8k.compute_score(response, truth, "flexible"),
            "math-verify": lambda response, truth: verify(parse(f"${truth}$"), parse(response)),
        }
    if task == "countdown":
        theirs = reasoning_gym.create_dataset("countdown", size=1)

        def score(response: str, truth: str):
            truth = read_ground_truth(truth)
            return theirs.score_answer(last_answer(response), {"metadata": truth, "answer": ""})

        return {"reasoning-gym (countdown)": score}
    return {}


def environment(name: str, count: int) -> dict[str, dict]:
    """An environment by our scorer, in its process, and by its own, in this one."""
    examples = list(islice((e for e in gym.examples(name, {}, 0) if e.demonstration), max(2, count // 3)))
    rows, ours = rows_of(examples), gym.scorer(name)
    theirs = reasoning_gym.create_dataset(name, size=1)
    entries = {truth: gym._decoded(json.loads(truth)) for _, truth in rows}
    return {
        f"{name}, ours (in a sandbox)": measure(ours, rows),
        f"{name}, reasoning-gym": measure(lambda r, t: theirs.score_answer(last_answer(r), entries[t]), rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args([*sys.argv[1:], *given_arguments()])
    tasks = sorted(path.parent.name for path in ROOT.glob("tasks/*/reward.py"))
    results: dict[str, dict] = {}
    for task in tasks:
        module = importlib.import_module(f"tasks.{task}.prepare_data")
        if not hasattr(module, "generate"):
            continue
        rows = task_rows(task, arguments.rows)
        compute_score = importlib.import_module(f"tasks.{task}.reward").compute_score
        results[task] = measure(lambda r, t, f=compute_score, task=task: f(task, r, t), rows)
        for name, scorer in peers(task).items():
            results[f"{task}, {name}"] = measure(scorer, rows)
    for name in ENVIRONMENTS:
        results |= environment(name, arguments.rows // 3)
    print("| scorer | rows | rows/s | p50, ms | p99, ms | max, ms |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, found in results.items():
        times = " | ".join(f"{found[key]:.3f}" for key in ("p50_ms", "p99_ms", "max_ms"))
        print(f"| {name} | {found['rows']} | {found['rows_per_second']:,.0f} | {times} |")
    over = [name for name, found in results.items() if name in tasks and found["p99_ms"] > LIMIT_MS]
    print(f"\np99 over {LIMIT_MS:g} ms: {', '.join(over) or 'no task'}")
    if arguments.out:
        names = ("verl", "math-verify", "reasoning-gym")
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
        write_json(arguments.out, {"results": results, "versions": {n: version(n) for n in names}, "machine": machine})


if __name__ == "__main__":
    main()
