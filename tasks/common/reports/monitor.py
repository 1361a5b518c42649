"""`make monitor`: every run under artifacts/ in a dashboard on this machine, followed while it trains.

It reads what each run writes to its own folder (docs/RUNS.md), so a resumed run is one curve. The dashboard is
trackio's, or tensorboard's where trackio is not installed (the a100 stack). Its data is a copy, removed at the end.
"""

import functools
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

from tasks.common.evaluation.rollouts import SAMPLED, dumped, in_turn
from tasks.common.evaluation.summary import OF_ANSWERS, Difference
from tasks.common.evaluation.tables import outcome
from tasks.common.interrupts import interrupt_on_sigterm
from tasks.common.machine import hardware
from tasks.common.process import errors_in_one_line
from tasks.common.reports.overview import evaluations, settings_of
from tasks.common.runs import health, launches, validation
from tasks.common.runs.folder import UNREADABLE, all_runs, read_metrics, recorded
from tasks.common.runs.secrets import masked_values
from tasks.common.settings import SettingsError, artifacts
from tasks.common.text import one_line

SECONDS = 3  # between two looks at the runs
TRAINING_SAMPLES, EVALUATION_SAMPLES = 8, 256  # of a step, of a validation or evaluation
# What verl writes per step, and in which folder of the run; validations with TEST_FREQ
DUMPS = (("training", "rollouts", TRAINING_SAMPLES), ("validation", "validation", EVALUATION_SAMPLES))
NO_REWARD = ("step", "uid")  # numbers beside a dumped response that are no part of its reward
LONGEST = 8000  # characters of a text that are shown
EVALUATION = "evaluation"  # told among the findings
MOST_TURNS = 64  # of an episode, and what it read between them


@dataclass(frozen=True)
class Sample:
    """A response to a prompt. ``kind``: of a training step, of verl's validation, of an evaluation of a checkpoint.
    ``turns``: of an episode, what the model said, then what it read, and so on."""

    kind: str
    step: int
    prompt: str
    response: str
    ground_truth: str
    rewards: dict[str, float]
    turns: tuple[str, ...] = ()


@dataclass
class Seen:
    """What there is to show of a run, each thing under a key that it keeps."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)  # training metrics
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)  # eval/<metric>, by step
    samples: dict[str, Sample] = field(default_factory=dict)
    findings: dict[str, health.Finding] = field(default_factory=dict)
    gpus: dict[float, dict[str, float]] = field(default_factory=dict)  # by time, seconds since 1970

    def since(self, shown: "Seen") -> "Seen | None":
        """What is new beyond ``shown``; None where something that was shown has changed (steps trained again)."""
        new = Seen()
        for part, before in vars(shown).items():
            now = getattr(self, part)
            if any(key not in now or str(now[key]) != str(value) for key, value in before.items()):  # nan != nan
                return None
            setattr(new, part, {key: value for key, value in now.items() if key not in before})
        return new

    def __bool__(self) -> bool:
        return any(vars(self).values())


def look(run_dir: Path) -> Seen:
    """Everything that ``run_dir`` has to show."""
    metrics = read_metrics(run_dir)
    seen = Seen(steps=metrics)
    for step, values in validation.curves(metrics).items():
        seen.steps[step] |= values
    for step, file, summary in evaluations(run_dir):
        seen.evaluations[step] = {f"eval/{name}": value["value"] for name, value in summary["metrics"].items()}
        _against_start(seen, step, summary)
        if (rollouts := file.with_name("rollouts.jsonl")).exists():
            seen.samples |= {f"eval-{file.parent.name}-{i}": s for i, s in enumerate(_evaluated(rollouts, step))}
    for kind, folder, most in DUMPS:
        for file in sorted((run_dir / folder).glob("[0-9]*.jsonl")):
            seen.samples |= {f"{kind}-{file.stem}-{i}": s for i, s in enumerate(_dumped(file, kind, most))}
    found = health.findings(metrics, SimpleNamespace(**recorded(run_dir)["settings"]))  # of any version's variables
    fired = {(each.rule, each.step) for each in found}
    for each in found:  # a rule that keeps firing is told of once
        if (each.rule, each.step - 1) not in fired:
            seen.findings[f"{each.rule}-{each.step}"] = each
    for row in _rows(run_dir / "gpu.jsonl"):
        when = datetime.fromtimestamp(row.pop("time"), UTC).timestamp()
        seen.gpus[when] = {name: float(value) for name, value in row.items()}
    return seen


def _against_start(seen: Seen, step: int, summary: dict) -> None:
    """Add what an evaluation says of the start that it is paired with: its answers, as step 0, and what was gained."""
    changes = {name: Difference.read(each) for name, each in summary.get("paired", {}).get("metrics", {}).items()}
    for name in ("pass@1", *OF_ANSWERS):
        if name in changes and name in summary["metrics"]:
            before = summary["metrics"][name]["value"] - changes[name].difference.value
            seen.evaluations.setdefault(0, {}).setdefault(f"eval/{name}", before)
    if lines := outcome("trained - start", {}, changes):
        seen.findings[f"{EVALUATION}-{step}"] = health.Finding(EVALUATION, step, "; ".join(lines))


def config_of(run_dir: Path) -> dict:
    """What one compares runs by: settings, ARGS, start and commit, with secrets masked."""
    config = settings_of(run_dir)
    for launch in launches.launches(run_dir)[-1:]:
        record = launches.read(launch)
        config |= {"stack": record["stack"], "commit": record["git"].get("commit", "")}
    return masked_values(config)


def _rows(file: Path, most: int | None = None) -> Iterator[dict]:
    """The first ``most`` whole lines of ``file``; none if it is not there."""
    with suppress(OSError), file.open(errors="replace") as stream:
        for line in islice(stream, most):
            if line.endswith("\n"):  # else it is being written
                with suppress(ValueError):
                    yield json.loads(line)


def _once_written(read):
    """``read(file, ...)``, again only when the file has changed."""
    cached = functools.lru_cache(maxsize=4096)(lambda file, changed, *rest: list(read(file, *rest)))
    return lambda file, *rest: cached(file, (file.stat().st_mtime_ns, file.stat().st_size), *rest)


@_once_written
def _dumped(file: Path, kind: str, most: int) -> Iterator[Sample]:
    for row in filter(None, islice(dumped(file), most)):
        texts = (_cut(row.pop(name)) for name in ("input", "output", "gts"))
        rewards = {k: float(v) for k, v in row.items() if isinstance(v, int | float) and k not in NO_REWARD}
        yield Sample(kind, int(file.stem), *texts, rewards, _turns(row))


@_once_written
def _evaluated(file: Path, step: int) -> Iterator[Sample]:
    for row in _rows(file, EVALUATION_SAMPLES):
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in row["prompt"])
        rewards = dict(row["reward"] or {}) | {"sampled": float(row["mode"] == SAMPLED)}
        texts = _cut(prompt), _cut(row["response"]), _cut(row["ground_truth"])
        yield Sample("evaluation", step, *texts, rewards, _turns({"turns": in_turn(row.get("messages", []))}))


def _turns(row: dict) -> tuple[str, ...]:
    found = row.get("turns")
    return tuple(map(_cut, found[:MOST_TURNS])) if isinstance(found, list) else ()


def _cut(text: str) -> str:
    text = str(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text)} characters)"


def changed(run_dir: Path) -> tuple:
    """Something that differs when ``look`` would."""
    files = [file for folder in ("metrics", "rollouts", "validation") for file in run_dir.glob(f"{folder}/*")]
    files += [run_dir / "gpu.jsonl", run_dir / "settings.json"]
    files += (artifacts() / "eval" / run_dir.parent.name).glob("*/summary.json")
    found = []
    for file in sorted(files):
        with suppress(OSError):
            found.append((file, file.stat().st_size, file.stat().st_mtime_ns))
    return tuple(found)


class Follower:
    """Brings to ``dashboard`` what the runs have that it does not show yet."""

    def __init__(self, dashboard):
        self.dashboard, self.shown, self.state = dashboard, {}, {}

    def update(self) -> int:
        """One look at all runs. Returns how many had something new."""
        count = 0
        for run_dir in all_runs():
            state = changed(run_dir)
            if self.state.get(run_dir) == state:
                continue
            self.state[run_dir] = state
            try:
                now, config = look(run_dir), config_of(run_dir)
            except UNREADABLE as error:  # the others are shown
                what = f"{type(error).__name__}: {one_line(str(error), 200)}"
                print(f"warning: {run_dir}: cannot be read ({what})", file=sys.stderr, flush=True)
                continue
            new = now.since(self.shown.get(run_dir, Seen()))
            if new is None:
                self.dashboard.remove(run_dir)
                new = now
            if new:
                self.dashboard.add(run_dir, new, config)
                count += 1
            self.shown[run_dir] = now
        return count


def open_dashboard(folder: Path):
    """trackio's, or tensorboard's where trackio is missing; its data in ``folder``. Raises SettingsError."""
    for name in ("trackio", "tensorboard"):
        if importlib.util.find_spec(name):
            module = importlib.import_module(f"tasks.common.reports.monitor_{name}")
            return getattr(module, name.capitalize())(folder)
    raise SettingsError("make monitor: neither trackio nor tensorboard is installed; run `make install`")


def main() -> None:
    interrupt_on_sigterm()
    port = os.environ.get("PORT") or "7860"
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise SettingsError(f"PORT={port[:80]}: must be a number from 1 to 65535")
    if hardware.listens(f"127.0.0.1:{port}"):
        hint = f"take another, make monitor PORT={int(port) + 1}"
        raise SettingsError(f"PORT={port}: something listens there already; {hint}")
    place = artifacts() / "monitor"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=f"{port}-") as folder:
        dashboard = open_dashboard(Path(folder))
        follower = Follower(dashboard)
        follower.update()
        with dashboard.served(int(port)):
            runs = len(follower.shown)
            what = f"{runs} run{'s' * (runs != 1)}" if runs else "no runs yet; they appear when they train"
            print(f"{dashboard.name}: http://127.0.0.1:{port} ({artifacts() / 'runs'}: {what})", flush=True)
            print(f"Ctrl-C ends it. From another machine: ssh -L {port}:127.0.0.1:{port} this-machine", flush=True)
            while True:
                time.sleep(SECONDS)
                follower.update()


if __name__ == "__main__":
    with errors_in_one_line(SettingsError), suppress(KeyboardInterrupt):
        main()
