"""The table that closes `make train`: base, warm-up and trained model on the same held-out prompts."""

import json
import os
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tasks.common.evaluate import paired_difference
from tasks.common.metrics import Estimate
from tasks.common.runs import last_step, read_json, read_metrics
from tasks.common.settings import Settings


def _scored(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def print_report(s: Settings, run_dir: Path) -> None:
    """Print the table, the paired difference of the trained model to its start, the time, and what to type next."""
    labels = ["base", *(["sft"] if s.INIT == "sft" else []), s.METHOD]
    table = Table(title=f"{s.TASK}: {s.TEST_SIZE} held-out prompts, mean [95 % interval]", title_justify="left")
    for column in ("model", "accuracy (greedy)", f"pass@1 ({s.EVAL_N} samples)", "mean score", "tokens"):
        table.add_column(column)
    for label in labels:
        summary = read_json(run_dir / f"eval/{label}.json")
        cells = [str(Estimate(**summary[key])) for key in ("accuracy", "pass@1", "score")]
        table.add_row(label, *cells, f"{summary['tokens']:.0f}")
    start, trained = labels[-2], labels[-1]
    scored = [_scored(run_dir / f"eval/{label}.jsonl") for label in (start, trained)]
    differences = {key: paired_difference(*scored, key) for key in ("score", "acc")}
    seconds = sum(step["timing_s/step"] for step in read_metrics(run_dir).values())
    console = Console(width=110, highlight=False)
    console.print()
    console.print(table)
    console.print(f"{trained} - {start}, paired: mean score {differences['score']}, pass@1 {differences['acc']}")
    console.print(
        f"{last_step(run_dir)} steps, {seconds:.0f} s of training{_total_time()}; all of it in {run_dir}",
        soft_wrap=True,
    )
    console.print("\nNext:")
    console.print(f"  make train TASK={s.TASK} STEPS={2 * s.STEPS}    # continue this run")
    console.print(f"  make train TASK={s.TASK} LR={s.LR / 2:g}    # a new run with another setting")
    console.print("  make new TASK=my_task    # a task of your own")


def _total_time() -> str:
    started = os.environ.get("STARTED")  # set by make, before the installation
    return f", {time.time() - float(started):.0f} s in all" if started else ""
