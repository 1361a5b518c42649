"""`make runs`: a table of all runs. `make diff RUN=a,b`: what differs between two, in settings and results."""

import os
import re
import sys
import time
from datetime import datetime
from pathlib import Path

from tasks.common.files import read_json
from tasks.common.process import errors_in_one_line
from tasks.common.runs import launches
from tasks.common.runs.folder import all_runs, named, read_metrics, recorded
from tasks.common.runs.repeat import commit_text, package_changes
from tasks.common.settings import Settings, SettingsError, artifacts
from tasks.common.text import one_line

REWARD = "critic/score/mean"
HEADER = ["run", "task", "method", "model", "steps", "reward", "accuracy", "started", "trained"]
# Results of the last step of training that stand in a comparison where a run has them.
SHOWN = (REWARD, "train/loss", "dpo/rewards/accuracies", "actor/entropy", "actor/kl_loss", "actor/grad_norm")
SHOWN += ("response_length/mean", "response_length/clip_ratio", "timing_s/step")
OLDER = "(not recorded)"


def step_of(model: str, run_dir: Path) -> int | None:
    """The step of ``run_dir``'s checkpoint that the path ``model`` names; None if it names none.

    Only the part from runs/ on counts, so that artifacts/ may be moved.
    """
    place = rf"/runs/{re.escape(run_dir.parent.name)}/{re.escape(run_dir.name)}/checkpoints/global_step_(\d+)/"
    found = re.search(place, f"{model}/")
    return int(found[1]) if found else None


def evaluation_files(run_dir: Path) -> list[tuple[int, Path]]:
    """Step and summary.json of the evaluations of a run's checkpoints (`make eval`), the last one of the last step
    last."""
    found = []
    for file in (artifacts() / "eval" / run_dir.parent.name).glob("*/summary.json"):
        # What was scored again names a file of rollouts, of which the original's summary tells.
        if (step := step_of(read_json(file).get("model", ""), run_dir)) is not None:
            found.append((step, file))
    return sorted(found, key=lambda each: (each[0], each[1].stat().st_mtime))


def evaluations(run_dir: Path) -> list[tuple[int, dict]]:
    """The same with what the files say."""
    return [(step, read_json(file)) for step, file in evaluation_files(run_dir)]


def started(run_dir: Path) -> float:
    """When a run was begun, in seconds: its first launch, or, of an older version's run, its settings' last change."""
    if found := launches.launches(run_dir):
        return datetime.fromisoformat(launches.read(found[0])["date"]).timestamp()
    return (run_dir / "settings.json").stat().st_mtime


def duration(seconds: float) -> str:
    """``42 s``, ``9 min 17 s`` or ``2 h 05 min``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def row(run_dir: Path) -> list[str]:
    """A run's line of the table, in the order of HEADER."""
    made, metrics = recorded(run_dir), read_metrics(run_dir)
    settings, warm_up = made["settings"], made["kind"] == "sft"
    model = settings["MODEL"]
    rewards = [data[REWARD] for data in metrics.values() if REWARD in data]
    accuracies = [s["metrics"]["accuracy"]["value"] for _, s in evaluations(run_dir) if "accuracy" in s["metrics"]]
    seconds = [data["timing_s/step"] for data in metrics.values() if "timing_s/step" in data]
    return [
        run_dir.name,
        run_dir.parent.name,
        "sft" if warm_up else settings["METHOD"],
        Path(model).name if Path(model).is_absolute() else model,
        f"{max(metrics, default=0)}/{settings['SFT_STEPS' if warm_up else 'STEPS']}",
        f"{rewards[-1]:.3f}" if rewards else "-",
        f"{accuracies[-1]:.3f}" if accuracies else "-",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(started(run_dir))),
        duration(sum(seconds)) if seconds else "-",
    ]


def aligned(rows: list[list[str]]) -> str:
    """``rows`` as text, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def table(task: str = "") -> str:
    """The runs of ``task`` (empty: of every task), the newest first."""
    runs = sorted(all_runs(task), key=started, reverse=True)
    if not runs:
        return f"no runs in {artifacts() / 'runs' / task} yet: run `make train TASK={task or 'countdown'}`"
    return aligned([HEADER, *map(row, runs)])


# ---- two runs side by side -----------------------------------------------------------------------------------------


def settings_rows(left: dict, right: dict) -> list[list[str]]:
    """The settings, ARGS and start that differ between two runs (``recorded``)."""
    pairs = {
        name: [run["settings"].get(name, OLDER) for run in (left, right)] for name in Settings.__dataclass_fields__
    }
    pairs["ARGS"] = [" ".join(run["arguments"]) for run in (left, right)]
    pairs["start"] = [run["start"] for run in (left, right)]
    return [[name, *map(str, values)] for name, values in pairs.items() if values[0] != values[1] and name != "RUN"]


def code_rows(left: Path, right: Path) -> list[list[str]]:
    """What of commit, uncommitted changes, task, data, Python and packages differs between the last launches."""
    records = [launches.read(found[-1]) if (found := launches.launches(run)) else None for run in (left, right)]
    if None in records:
        return [["commit, packages", *(OLDER if record is None else "recorded" for record in records)]]
    first, second = records
    pairs = {
        "commit": [commit_text(record["git"]) for record in records],
        "uncommitted changes": [uncommitted(record) for record in records],
        "python": [record["python"] for record in records],
    }
    for part in ("task", "data"):
        for name in sorted(first[part].keys() | second[part].keys()):
            pairs[f"{part}: {Path(name).name}"] = [record[part].get(name, "none")[:12] for record in records]
    rows = [[name, *values] for name, values in pairs.items() if values[0] != values[1]]
    if first["changes"] != second["changes"] and pairs["uncommitted changes"][0] == pairs["uncommitted changes"][1]:
        rows.append(["uncommitted changes", "differ: see launches/*/changes.diff", ""])
    for change in package_changes(first["packages"], second["packages"]):
        name, before, _, after = change.split()
        rows.append([name, before, after])
    return rows


def uncommitted(record: dict) -> str:
    """The files that a launch's record has changes of, and the untracked ones."""
    files = re.findall(r"^diff --git a/.* b/(.*)$", record["changes"], re.MULTILINE)
    return ", ".join([*files, *(f"{name} (new)" for name in record["git"].get("untracked", []))]) or "none"


def result_rows(left: Path, right: Path) -> list[list[str]]:
    """Steps, the last step's metrics, and the last evaluation's, of both runs."""
    values = [_results(run) for run in (left, right)]
    return [[name, *(each.get(name, "-") for each in values)] for name in values[0] | values[1]]


def _results(run_dir: Path) -> dict[str, str]:
    metrics = read_metrics(run_dir)
    found = {"step": str(max(metrics, default=0))}
    last = metrics.get(max(metrics, default=0), {})
    names = [*SHOWN, *sorted(name for name in last if name.startswith("val-core/"))]
    found |= {name: f"{last[name]:.4g}" for name in names if name in last}
    if done := evaluations(run_dir):
        step, summary = done[-1]
        found["evaluation of step"] = str(step)
        found["prompts x samples"] = f"{summary['prompts']} x {summary['samples']}"
        for name, estimate in summary["metrics"].items():
            found[f"eval: {name}"] = f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"
    return found


def comparison(names: str, task: str = "") -> str:
    """The text of `make diff RUN=a,b`. Raises SettingsError."""
    parts = [name for name in names.split(",") if name]
    if len(parts) != 2:
        raise SettingsError(f"RUN={names}: name two runs, RUN=a,b; `make runs` lists all")
    left, right = (named(name, task) for name in parts)
    sections = {
        "settings": settings_rows(recorded(left), recorded(right)),
        "code, data and packages": code_rows(left, right),
        "results": result_rows(left, right),
    }
    text = []
    for title, rows in sections.items():
        cells = [[one_line(cell, 60) or "(empty)" for cell in each] for each in rows]
        text.append(aligned([[title, *parts], *cells]) if cells else f"{title}: the same")
    return "\n\n".join(text)


if __name__ == "__main__":
    with errors_in_one_line(SettingsError):
        task = os.environ.get("TASK", "")
        print(table(task) if sys.argv[1] == "runs" else comparison(os.environ.get("RUN", ""), task))
