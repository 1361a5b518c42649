"""`make report TASK=x [RUN=name]`: a run as one HTML file that needs nothing beside it, to attach to a pull request."""

import base64
import json
import math
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import jinja2

from verl_tasks.evaluation import plots
from verl_tasks.evaluation.sample import model_name
from verl_tasks.evaluation.summary import Difference
from verl_tasks.evaluation.tables import comparison_table, outcome, sizes
from verl_tasks.files import read_json, write_text
from verl_tasks.models.find import EMBEDDED, embedded_folder
from verl_tasks.process import errors_in_one_line
from verl_tasks.reports.overview import HEADER, evaluations, row, rules_of, started
from verl_tasks.reports.samples import Sample, of_evaluation, of_step
from verl_tasks.runs import launches
from verl_tasks.runs.folder import all_runs, lineage, named, readable
from verl_tasks.runs.health import newest_by_rule
from verl_tasks.runs.run import Metrics, Run, read_metrics, recorded
from verl_tasks.runs.secrets import masked, masked_values
from verl_tasks.settings import ROOT, SettingsError, artifacts, load_settings
from verl_tasks.text import one_line, without_middle

SAMPLES = 6  # rollouts that are shown
PROMPT, RESPONSE, TRUTH = 1500, 3000, 500  # characters of each
TURNS, TURN = 24, 1000  # of an episode, with what it read between them; characters of each
CELL = 500  # characters of a cell
LINES = 10  # in one picture
# Titles of the pictures, and the metrics (of verl and of tasks/common/training/trl_dpo.py) that they draw.
CURVES = {
    "reward": ("critic/score/mean",),
    "loss": ("train/loss", "val/loss"),
    "answers of the rollouts": ("answers/*",),
    "validation": ("val-core/*",),
    "share of pairs ranked right": ("dpo/rewards/accuracies", "val/accuracy"),
    "margin of held-out pairs": ("val/margin",),
    "rewards of pairs": ("dpo/rewards/chosen", "dpo/rewards/rejected", "dpo/rewards/margins"),
    "entropy, nats": ("actor/entropy", "dpo/entropy"),
    "gradient norm": ("actor/grad_norm", "train/grad_norm"),
    "KL to the start": ("actor/kl_loss", "actor/reward_kl_penalty"),
    "KL of an update": ("actor/ppo_kl",),
    "response length, tokens": ("response_length/mean",),
    "truncated: share of responses as long as the longest": ("response_length/clip_ratio",),
    "age of the tokens, steps": ("staleness/mean", "staleness/max"),
    "idle seconds of a step": ("idle/trainer", "idle/sampler"),
    "turns of an episode, and calls that could not be carried out": ("episode/turns", "episode/tool_errors"),
    "share of episodes cut off, by what": ("episode/cut_*", "episode/timeout", "episode/failed"),
    "seconds of an episode, of model and program": ("episode/model_s", "episode/program_s"),
    "sequences of an episode": ("episode/sequences",),
    "tokens per second and GPU": ("perf/throughput",),
    "memory of a trainer's GPU, GB": ("actor/perf/max_memory_allocated_gb",),
    "seconds of each phase": ("timing_s/*",),
}


@dataclass(frozen=True)
class Table:
    """Rows under a header; ``folded``: the words that open it, empty for a table that is open."""

    header: list[str]
    rows: list[list]
    folded: str = ""


@dataclass(frozen=True)
class Picture:
    """An SVG and the ``text`` that stands in its place where it is not shown."""

    content: bytes
    text: str
    wide: bool = False

    @property
    def source(self) -> str:
        return f"data:image/svg+xml;base64,{base64.b64encode(self.content).decode()}"


@dataclass(frozen=True)
class Section:
    """A part of the page, shown in the order of the fields; ``blocks``: harmless texts under a heading."""

    title: str
    lines: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    blocks: list[tuple[str, str]] = field(default_factory=list)


def chosen(task: str, name: str) -> Path:
    """The run ``name`` of ``task``; without a name its newest RL or DPO run, with a step where one has any.
    Raises SettingsError."""
    if name:
        return named(name, task)
    runs = [run for run in all_runs(task) if recorded(run)["kind"] == "rl"]
    if not runs:
        raise SettingsError(f"no RL or DPO run in {artifacts() / 'runs' / task} yet: run `make train TASK={task}`")
    newest = sorted(runs, key=started, reverse=True)
    return next((run for run in newest if any(Metrics(run, strict=False).new())), newest[0])


def began_with(run_dir: Path) -> dict[str, str]:
    """The models that a run began with, as an evaluation would name them: base, perhaps sft, and the rounds before."""
    rounds = [each.record for each in lineage(Run.read(run_dir))]
    starts, first = [each["start"] for each in rounds], rounds[0]
    if first["kind"] == "sft" or first["settings"]["INIT"] == "base":
        models = {"base": starts[0]}
    else:
        base = first["settings"]["MODEL"]
        folder = embedded_folder() if base == "embedded" else Path(base).expanduser()
        models = {"base": str(folder.resolve()) if base == "embedded" or folder.is_dir() else base, "sft": starts[0]}
    return models | {f"round{number}": start for number, start in enumerate(starts[1:], 1)}


def same_model(left: str, right: str) -> bool:
    """Whether two paths or hub ids are of one model; what lies in artifacts/ may have been moved."""
    tail = rf"/(?:runs/[^/]+/[^/]+/checkpoints/.+|models/{EMBEDDED}[^/]*)$"
    tails = [found[0] for path in (left, right) if (found := re.search(tail, path))]
    return left == right or (len(tails) == 2 and tails[0] == tails[1])


def curves(metrics: dict[int, dict]) -> Section:
    """Pictures of the metrics that the run has, and their numbers."""
    pictures, rows = [], []
    names = dict.fromkeys(name for step in metrics.values() for name in step)
    for title, patterns in CURVES.items():
        wanted = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if not wanted:
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
        pictures.append(Picture(svg, f"{title}: {', '.join(drawn)}", wide=len(most) > 3))
    table = Table(["metric", "first", "last", "lowest", "highest", "steps"], rows, "the numbers")
    return Section("Curves", [], sorted(pictures, key=lambda picture: picture.wide), [table])


def health(made: dict, metrics: dict[int, dict]) -> Section:
    """What the rules of `make train` find in the metrics."""
    if made["kind"] == "sft":
        return Section("Health", ["the rules are about RL; this is a warm-up"])
    found = rules_of(made).all(metrics)
    if not found:
        return Section("Health", ["no rule fired (docs/RUNS.md)"])
    times = Counter(each.rule for each in found)
    rows = [[f.rule, f.step, times[f.rule], len(metrics), f.text] for f in newest_by_rule(found)]
    return Section("Health", tables=[Table(["rule", "last step", "times", "of steps", "last finding"], rows)])


def evaluation(run_dir: Path, made: dict, step: int | None = None) -> Section:
    """`make eval` of ``step`` (None: the last one that has any) of the most prompts, beside those of the models that
    the run began with."""
    task, evaluated = run_dir.parent.name, evaluations(run_dir, step)
    command = f"make eval TASK={task} RUN={run_dir.name}{'' if step is None else f' STEP={step}'}"
    if not evaluated:
        return Section("Base → trained", [f"not evaluated: {command}"])
    _, last, trained = evaluated[-1]
    began = began_with(run_dir)
    files = sorted((artifacts() / "eval" / task).glob("*/summary.json"), key=lambda file: file.stat().st_mtime)
    conditions = _conditions(last)
    alike = [read_json(file) for file in files if _conditions(file) == conditions]
    summaries = {
        label: summary  # the newest one
        for label, model in began.items()
        for summary in alike
        if summary.get("prompts") == trained["prompts"] and same_model(summary.get("model", ""), model)
    }
    label = "trained" if made["kind"] == "sft" else made["settings"]["METHOD"]
    if before := sum(name.startswith("round") for name in began):
        label = f"round{before + 1}"
    paired = trained.get("paired", {})
    to = next((name for name in summaries if same_model(paired.get("to", ""), began[name])), None)
    changes = {name: Difference.read(each) for name, each in paired["metrics"].items()} if to else None
    summaries[label] = trained
    lines = outcome(f"{label} - {to}", summaries, changes)
    lines += [f"{name}: {model_name(each['model'])}, {sizes(each)}" for name, each in summaries.items()]
    if len(summaries) == 1:
        lines.append(f"no evaluation of its base on the same prompts with the same sampling: {command}")
    table = Table(*comparison_table(summaries, changes, f"{label} - {to}", meanings=True))
    return Section("Base → trained", lines, tables=[table])


def _conditions(summary: Path) -> dict:
    """How an evaluation sampled and scored, without the model and LIMIT."""
    meta = read_json(summary.with_name("rollouts.meta.json"))
    return {name: meta.get(name) for name in ("reward", "rows", "sampling")}


def samples(run_dir: Path, metrics: dict[int, dict]) -> Section:
    """Rollouts of the last of the steps of ``metrics`` that has any, else of the last evaluation, from the highest
    score to the lowest."""
    sources = [(f"rollouts of step {n}", of_step(run_dir / f"rollouts/{n}.jsonl")) for n in reversed(metrics)]
    for step, summary, _ in reversed(evaluations(run_dir)):
        what = f"responses of the evaluation of step {step}"
        sources.append((what, of_evaluation(summary.with_name("rollouts.jsonl"))))
    for what, found in sources:
        if scored := [sample for sample in found if "score" in sample.rewards]:
            shown, mean = spread(scored), sum(sample.rewards["score"] for sample in scored) / len(scored)
            line = f"{len(shown)} of {len(scored)} {what}; their mean score is {mean:.3f}"
            return Section("Samples", [line], blocks=[block for sample in shown for block in transcript(sample)])
    return Section("Samples", [f"no rollouts in {run_dir}/rollouts: SFT and DPO write none"])


def transcript(sample: Sample) -> list[tuple[str, str]]:
    """A sample as blocks under a heading; an episode without its middle beyond TURNS."""
    said = [("response", without_middle(sample.said[0], RESPONSE))]
    if len(sample.said) > 1:
        heads = [f"turn {n // 2 + 1}: {'environment' if n % 2 else 'model'}" for n in range(len(sample.said))]
        said = [(head, without_middle(text, TURN)) for head, text in zip(heads, sample.said, strict=True)]
    if len(said) > TURNS:
        said[TURNS // 2 : -TURNS // 2] = [("", f"[… {len(said) - TURNS} messages left out …]")]
    prompt = (f"score {sample.rewards['score']:.4g}: prompt", without_middle(sample.prompt, PROMPT))
    return [prompt, *said, ("ground truth", without_middle(sample.truth, TRUTH))]


def spread(samples: list[Sample]) -> list[Sample]:
    """SAMPLES of ``samples`` at equal distances in the order of their scores, the highest first."""
    ordered = sorted(samples, key=lambda sample: -sample.rewards["score"])
    places = range(min(SAMPLES, len(ordered)))
    return [ordered[round(place * (len(ordered) - 1) / max(1, places[-1]))] for place in places]


def settings(run_dir: Path, made: dict, launch: dict) -> Section:
    """Settings that are not the task's defaults, and all of them, folded."""
    task, values = run_dir.parent.name, masked_values(made["settings"])
    more = {"ARGS": " ".join(made["arguments"])} | launch.get("judge", {})
    section = Section("Settings")
    try:
        if not (train_sh := ROOT / "tasks" / task / "train.sh").is_file():
            raise SettingsError(f"there is no {train_sh}")
        given = {name: str(made["settings"][name]) for name in ("STACK", "METHOD", "N_GPUS")}
        usual = asdict(load_settings(given | {"TASK": task}))
        other = [name for name in values if name != "RUN" and made["settings"][name] != usual.get(name)]
        rows = [[name, values[name], usual.get(name, "(none today)")] for name in other]
        rows += [[name, value, "(none)"] for name, value in more.items() if value]
        section.tables.append(Table(["setting", "this run", "default today"], rows))
    except (SettingsError, KeyError) as error:
        section.lines.append(f"the task's defaults are not known: {error}")
    every = values | more | {"starts from": made["start"]}
    section.tables.append(Table(["setting", "value"], [[*pair] for pair in every.items()], "all settings"))
    return section


def code(run_dir: Path, launch: dict) -> Section:
    """Data, code and packages of the last launch."""
    if not launch:
        return Section("Data, code and packages", [f"not known: there is no record in {run_dir}/launches"])
    rows = [["stack", launch["stack"]], ["last launch", launch["date"]]]
    rows += [[f"sha256 of {Path(name).name}", digest] for name, digest in launch["data"].items()]
    rows += [[*each] for each in launches.code_of(launch).items()]
    return Section("Data, code and packages", tables=[Table(["", ""], rows, "as the launch recorded them")])


def page(run_dir: Path) -> str:
    """The HTML text about a run; the same files give the same text. Raises SettingsError, also without metrics."""
    made, metrics = recorded(run_dir), read_metrics(run_dir)
    if not metrics:
        where = f"{run_dir}/metrics"
        raise SettingsError(f"RUN={run_dir.name}: has no metrics in {where}; it ended before its first step")
    launch = launches.last(run_dir)
    sections = [
        evaluation(run_dir, made),
        curves(metrics),
        health(made, metrics),
        samples(run_dir, metrics),
        settings(run_dir, made, launch),
        code(run_dir, launch),
    ]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    how = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    templates = jinja2.Environment(loader=loader, **how)
    templates.filters["short"] = lambda value: one_line(masked(str(value)), CELL)
    head = dict(zip(HEADER, row(run_dir), strict=True))
    return templates.get_template("run_report.html.jinja").render(head=head, sections=sections)


def write(run_dir: Path) -> Path:
    """Write the report of a run and return its path."""
    path = artifacts() / "reports" / run_dir.parent.name / run_dir.name / "report.html"
    with readable(run_dir):
        text = page(run_dir)
    write_text(path, text)
    return path


if __name__ == "__main__":
    with errors_in_one_line(SettingsError, json.JSONDecodeError):
        print(write(chosen(os.environ.get("TASK", ""), os.environ.get("RUN", ""))))
