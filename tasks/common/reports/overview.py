"""`make runs`: a table of all runs. `make diff RUN=a,b`: what differs between two, in settings and results."""

import functools
import math
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

from verl_tasks.files import read_json
from verl_tasks.process import errors_in_one_line
from verl_tasks.runs import launches
from verl_tasks.runs.folder import UNREADABLE, all_runs, broken_runs, named, readable
from verl_tasks.runs.health import Health
from verl_tasks.runs.run import read_metrics, recorded
from verl_tasks.settings import SettingsError, artifacts
from verl_tasks.text import one_line, show

REWARD = "critic/score/mean"
HEADER = ["run", "task", "method", "model", "steps", "reward", "accuracy", "started", "trained"]
# Results of the last step of training that stand in a comparison where a run has them.
SHOWN = (REWARD, "train/loss", "dpo/rewards/accuracies", "actor/entropy", "actor/kl_loss", "response_length/mean")
ERROR = "error: "


def checkpoint_of(model: str) -> tuple[str, str, int] | None:
    """Task, run and step of the checkpoint that the path ``model`` names, or None. artifacts/ may have been moved."""
    found = re.search(r"/runs/([^/]+)/([^/]+)/checkpoints/global_step_(\d{1,18})/", f"{model}/")
    return (found[1], found[2], int(found[3])) if found else None


def summaries(task: str) -> dict[str, list[tuple[int, Path, dict]]]:
    """Step, summary.json and its content of each `make eval` of a checkpoint of ``task``, by its run's name."""
    found = defaultdict(list)
    for file in (artifacts() / "eval" / task).glob("*/summary.json"):
        summary = read_json(file)
        # A rescored file has "rollouts of FILE" as its model; the original's summary counts.
        if (made := checkpoint_of(summary.get("model", ""))) and made[0] == task:
            found[made[1]].append((made[2], file, summary))
    return found


def evaluations(run_dir: Path, of: int | None = None, read: Callable = summaries) -> list[tuple[int, Path, dict]]:
    """A run's of the ``summaries`` that ``read`` gives (``of``: of that step alone), by step, prompts and time: a look
    with LIMIT replaces no whole one.

    Raises SettingsError for a summary that has not the form of one: a run may come from elsewhere.
    """
    found = [each for each in read(run_dir.parent.name).get(run_dir.name, []) if of in (None, each[0])]
    for _, file, summary in found:
        _check_summary(file, summary)
    return sorted(found, key=lambda each: (each[0], each[2]["prompts"], each[1].stat().st_mtime))


def _check_summary(file: Path, summary: dict) -> None:
    try:
        numbers = [each[name] for each in summary["metrics"].values() for name in ("value", "low", "high")]
        sum([*numbers, summary["prompts"], summary["samples"]])
    except UNREADABLE as error:
        what = one_line(f"{type(error).__name__}: {error}", 80)
        raise SettingsError(f"{file}: is no summary of an evaluation ({what}); correct or remove it") from error


def rules_of(made: dict) -> Health:
    """The health rules of the run with the record ``made``, whose settings may be another version's."""
    return Health(SimpleNamespace(**made["settings"]))


def started(run_dir: Path) -> float:
    """When a run began, in seconds since 1970: its first launch; without a launch record, its settings' last change."""
    if found := launches.launches(run_dir):
        return datetime.fromisoformat(launches.read(found[0])["date"]).timestamp()
    return (run_dir / "settings.json").stat().st_mtime


def duration(seconds: float) -> str:
    """``42 s``, ``9 min 17 s`` or ``2 h 05 min``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def row(run_dir: Path, read: Callable = summaries) -> list[str]:
    """A run's line of the table, in the order of HEADER; ``read`` as of ``evaluations``."""
    made, metrics = recorded(run_dir), read_metrics(run_dir)
    settings, warm_up = made["settings"], made["kind"] == "sft"
    model = settings["MODEL"]
    rewards = [data[REWARD] for data in metrics.values() if REWARD in data]
    accuracies = [
        s["metrics"]["accuracy"]["value"] for *_, s in evaluations(run_dir, read=read) if "accuracy" in s["metrics"]
    ]
    seconds = sum(data.get("timing_s/step", 0.0) for data in metrics.values())
    return [
        run_dir.name,
        run_dir.parent.name,
        "sft" if warm_up else settings["METHOD"],
        Path(model).name if Path(model).is_absolute() else model,
        f"{max(metrics, default=0)}/{settings['SFT_STEPS' if warm_up else 'STEPS']}",
        f"{rewards[-1]:.3f}" if rewards else "-",
        f"{accuracies[-1]:.3f}" if accuracies else "-",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(started(run_dir))),
        duration(seconds) if 0 < seconds < math.inf else "-",
    ]


def aligned(rows: list[list[str]]) -> str:
    """``rows`` as text, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def table(task: str = "") -> str:
    """The runs of ``task`` (empty: of every task), the newest first; then an error: line for each broken run."""
    rows = []
    broken = [f"{ERROR}{run}/settings.json is no record of a run: {why}" for run, why in broken_runs(task).items()]
    read = functools.cache(summaries)
    for run_dir in all_runs(task):
        try:
            with readable(run_dir):
                rows.append((started(run_dir), [one_line(str(cell), 80) for cell in row(run_dir, read)]))
        except SettingsError as error:
            broken.append(f"{ERROR}{error}")
    if not rows and not broken:
        return f"no runs in {artifacts() / 'runs' / task} yet: run `make train TASK={task or 'name'}`"
    newest_first = [cells for _, cells in sorted(rows, key=lambda each: each[0], reverse=True)]
    return "\n".join([aligned([HEADER, *newest_first]), *broken])


def settings_of(run_dir: Path) -> dict:
    """A run's settings except its name, its ARGS and the model it starts from."""
    made = recorded(run_dir)
    settings = {name: value for name, value in made["settings"].items() if name != "RUN"}
    return settings | {"ARGS": " ".join(made["arguments"]), "start": made["start"]}


def code_of(run_dir: Path) -> dict:
    """The code, data and packages of a run's last launch, if any."""
    if not (record := launches.last(run_dir)):
        return {}
    data = {f"data: {Path(name).name}": digest[:12] for name, digest in record["data"].items()}
    return launches.code_of(record) | data


def results_of(run_dir: Path) -> dict:
    """The last step, its metrics, and the last evaluation's."""
    metrics = read_metrics(run_dir)
    step = max(metrics, default=0)
    last = metrics.get(step, {})
    names = [*SHOWN, *sorted(name for name in last if name.startswith("val-core/"))]
    found = {"step": step} | {name: f"{last[name]:.4g}" for name in names if name in last}
    for evaluated, _, summary in evaluations(run_dir)[-1:]:
        found["evaluation of step"] = evaluated
        found["prompts x samples"] = f"{summary['prompts']} x {summary['samples']}"
        for name, estimate in summary["metrics"].items():
            found[f"eval: {name}"] = f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"
    return found


def side_by_side(left: dict, right: dict, same: bool = False) -> list[list[str]]:
    """Rows of name and both values, "-" for none, where they differ; ``same``: all of them."""
    values = {name: (left.get(name, "-"), right.get(name, "-")) for name in left | right}
    return [[name, *map(str, pair)] for name, pair in values.items() if same or pair[0] != pair[1]]


def comparison(names: str, task: str = "") -> str:
    """The text of `make diff RUN=a,b`. Raises SettingsError."""
    parts = [name for name in names.split(",") if name]
    if len(parts) != 2:
        raise SettingsError(f"RUN={names}: name two runs, RUN=a,b; `make runs` lists all")
    left, right = (named(name, task) for name in parts)
    sections = {
        "settings": side_by_side(settings_of(left), settings_of(right)),
        "code, data and packages": side_by_side(code_of(left), code_of(right)),
        "results": side_by_side(results_of(left), results_of(right), same=True),
    }
    text = []
    for title, rows in sections.items():
        cells = [[one_line(cell, 60) or "(empty)" for cell in each] for each in rows]
        text.append(aligned([[title, *parts], *cells]) if cells else f"{title}: the same")
    return "\n\n".join(text)


if __name__ == "__main__":
    with errors_in_one_line(SettingsError):
        task = os.environ.get("TASK", "")
        if sys.argv[1] == "runs":
            show(text := table(task))
            sys.exit(f"\n{ERROR}" in f"\n{text}")
        show(comparison(os.environ.get("RUN", ""), task))
