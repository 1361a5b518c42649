"""`make monitor`: every run under artifacts/ in a dashboard on this machine, followed while it trains.

It reads what each run writes to its own folder (docs/RUNS.md), so a resumed run is one curve, and shows it in trackio
(https://github.com/gradio-app/trackio), whose store is a copy, removed at the end. Where trackio is not installed (the
a100 stack), tensorboard shows what verl logged for it (LOGGER=tensorboard).
"""

import contextlib
import importlib.util
import io
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from verl_tasks.evaluation.summary import Difference
from verl_tasks.evaluation.tables import outcome
from verl_tasks.files import NewLines
from verl_tasks.leftovers import interrupt_on_sigterm
from verl_tasks.machine import hardware
from verl_tasks.process import errors_in_one_line
from verl_tasks.reports.overview import evaluations, rules_of, settings_of
from verl_tasks.reports.samples import Sample, of_evaluation, of_step
from verl_tasks.runs import validation
from verl_tasks.runs.folder import all_runs, readable
from verl_tasks.runs.run import Metrics, recorded
from verl_tasks.runs.secrets import masked_values
from verl_tasks.settings import Command, SettingsError, artifacts, load_settings
from verl_tasks.text import without_middle

SECONDS = 3  # between two looks at the runs
# Of a step's rollouts, a validation, an evaluation, so many samples are shown.
SAMPLES = {"rollouts": 8, "validation": 256, "eval": 256}
LONGEST, MOST_TURNS = 8000, 64  # characters of a text, texts of an episode
EVALUATION = "evaluation"  # told among the findings
LEVELS = {"nan": "error", "collapse": "error", EVALUATION: "info"}
FINDING, GPU = "finding", "gpu"  # parts of a run; the others are metrics


class Shown:
    """What the dashboard has of a run: how far each file is read, and the evaluations."""

    def __init__(self, run_dir: Path):
        self.run_dir, self.metrics, self.gpus = run_dir, Metrics(run_dir), NewLines(run_dir / "gpu.jsonl")
        self.health, self.fired = rules_of(recorded(run_dir)), set()
        self.rows, self.step, self.unseen = {}, -math.inf, []  # new metrics, the last step, its samples to come
        self.state, self.evaluated = [], {}
        # New: each thing under its part, its step or time, and what else tells it from others.
        self.new: dict[tuple, dict] = {}

    def look(self) -> bool:
        """Read what is new; whether something that is shown has changed."""
        again = False
        for step, row in self.metrics.new():
            validation.forget(self.rows, step)
            self.rows[step], again = row, again or step <= self.step  # trained again
        for _, line in self.gpus.read():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                self.new[GPU, datetime.fromtimestamp(row.pop("time"), UTC).isoformat()] = row
        if self.state != (state := changed(self.run_dir)):
            now = _evaluations(self.run_dir, self.evaluated)
            again |= any(str(now.get(key)) != str(value) for key, value in self.evaluated.items())
            self.new |= {key: value for key, value in now.items() if key not in self.evaluated}
            self.state, self.evaluated = state, now
        for step, row in self.rows.items():
            self._samples()
            self.new["step", step], self.step, self.unseen = row, step, ["rollouts", "validation"]
            found = {each.rule: each for each in self.health.findings(step, row)}
            for rule in found.keys() - self.fired:  # a rule that keeps firing is told of once
                self.new[FINDING, step, rule] = {"text": found[rule].text}
            self.fired = found.keys()
        self._samples()
        self.rows = {}
        return again

    def _samples(self) -> None:
        """Those of the last step, which verl may write after its metrics."""
        for folder in [*self.unseen]:
            if (file := self.run_dir / f"{folder}/{self.step}.jsonl").is_file():
                self.new[folder, self.step] = _traces(folder, of_step(file), self.step)
                self.unseen.remove(folder)


def _evaluations(run_dir: Path, shown: dict) -> dict[tuple, dict]:
    """What a run's evaluations have to show. Samples that are ``shown`` already are not read again."""
    now: dict[tuple, dict] = {}
    for step, file, summary in evaluations(run_dir):
        values = {name: each["value"] for name, each in summary["metrics"].items()}
        now["evaluation", step] = {f"eval/{name}": value for name, value in values.items()}
        changes = {name: Difference.read(each) for name, each in summary.get("paired", {}).get("metrics", {}).items()}
        for name in filter(values.__contains__, changes):  # with what the training began with
            start = now.setdefault(("evaluation", 0), {})
            start.setdefault(f"eval/{name}", values[name] - changes[name].difference.value)
        if said := outcome("trained - start", {"trained": summary}, changes):
            now[FINDING, step, EVALUATION] = {"text": "; ".join(said)}
        if (rollouts := file.with_name("rollouts.jsonl")).is_file():
            key = ("eval", step, file.parent.name, rollouts.stat().st_mtime_ns)
            now[key] = shown.get(key) or _traces("eval", of_evaluation(rollouts), step)
    return now


def _traces(part: str, samples: Iterator[Sample], step: int) -> dict[str, list]:
    """The first ``samples`` of a file as trackio's conversations."""
    from trackio import Trace

    traces = []
    for each in islice(samples, SAMPLES[part]):
        texts = [without_middle(text, LONGEST) for text in (each.prompt, *each.said[:MOST_TURNS])]
        messages = [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]
        status = f"score {each.rewards.get('score', float('nan')):.3g}"  # a column of the list
        told = {"kind": part, "ground_truth": without_middle(each.truth, LONGEST), **each.rewards, "status": status}
        traces.append(Trace(messages, told)._to_dict("", "", step))
    return {part: traces}


def changed(run_dir: Path) -> list[tuple]:
    """Something that differs when ``_evaluations`` would."""
    files = sorted((artifacts() / "eval" / run_dir.parent.name).glob("*/summary.json"))
    return [(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


class Follower:
    """Brings to trackio's ``store`` what the runs have that it does not show yet: a project for each task."""

    def __init__(self, store):
        self.store, self.shown, self.said = store, {}, {}

    def update(self) -> int:
        """One look at all runs. Returns how many had something new."""
        count = 0
        for run_dir in all_runs():
            task, run = run_dir.parent.name, run_dir.name
            try:
                with readable(run_dir):
                    shown = self.shown.get(run_dir) or self.shown.setdefault(run_dir, Shown(run_dir))
                    if shown.look():
                        self.store.delete_run(task, run)
                        shown = self.shown[run_dir] = Shown(run_dir)
                        shown.look()
                    if shown.new:
                        self._add(task, run, shown.new, masked_values(settings_of(run_dir)))
            except SettingsError as error:  # the others are shown
                if self.said.get(run_dir) != str(error):
                    print(f"warning: {error}", file=sys.stderr, flush=True)
                self.said[run_dir] = str(error)
                continue
            count += bool(shown.new)
            shown.new = {}
        return count

    def _add(self, task: str, run: str, new: dict[tuple, dict], config: dict) -> None:
        metrics = {key: value for key, value in new.items() if key[0] not in (FINDING, GPU)}
        self.store.bulk_log(task, run, [*metrics.values()], [step for _, step, *_ in metrics], config=config)
        gpus = {key: value for key, value in new.items() if key[0] == GPU}
        self.store.bulk_log_system(task, run, [*gpus.values()], [time for _, time in gpus])
        found = {key: value["text"] for key, value in new.items() if key[0] == FINDING}
        names = [rule.replace("_", " ") for *_, rule in found]
        levels = [LEVELS.get(rule, "warn") for *_, rule in found]
        self.store.bulk_alert(task, run, names, [*found.values()], levels, [step for _, step, _ in found])


def free_port() -> int:
    """PORT, by default 7860. Raises SettingsError where it is none, or is taken."""
    port = load_settings({"PORT": os.environ.get("PORT") or "7860"}, cls=Command).PORT
    hardware.refuse_taken(port)
    return port


def follow(port: int, told: str) -> None:
    """trackio's dashboard on loopback, with what the runs have; says so once it answers."""
    place = artifacts() / "monitor"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=f"{port}-") as folder:
        os.environ["TRACKIO_DIR"] = folder  # read when trackio is imported
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        follower = Follower(SQLiteStorage)
        follower.update()
        with contextlib.redirect_stdout(io.StringIO()):  # an address with a token to write
            off = dict.fromkeys(("open_browser", "block_thread", "share", "mcp_server"), False)
            server, *_ = trackio.show(host="127.0.0.1", server_port=port, **off)
        print(told, flush=True)
        try:
            while True:
                time.sleep(SECONDS)
                follower.update()
        finally:
            server.close()


def main() -> None:
    interrupt_on_sigterm()
    port, count, folder = free_port(), len(all_runs()), artifacts() / "runs"
    runs = f"{count} run{'s' * (count != 1)}" if count else "no runs yet; they appear when they train"
    told = f"http://127.0.0.1:{port} ({folder}: {runs})\n"
    told += f"Ctrl-C ends it. From another machine: ssh -L {port}:127.0.0.1:{port} this-machine"
    if importlib.util.find_spec("trackio"):
        follow(port, f"trackio: {told}")
    print(f"tensorboard: {told}", flush=True)
    place = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port), "--reload_interval", "5"]
    os.execv(sys.executable, [sys.executable, "-m", "tensorboard.main", *place, "--load_fast", "false"])


if __name__ == "__main__":
    with errors_in_one_line(SettingsError), contextlib.suppress(KeyboardInterrupt):
        main()
