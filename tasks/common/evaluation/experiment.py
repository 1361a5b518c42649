"""`make experiment`: compare several methods, rates and seeds from the same start and data."""

from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from verl_tasks.evaluation.sample import Scoring, report_errors, sampled, test_job
from verl_tasks.evaluation.statistics import pooled_mean
from verl_tasks.evaluation.summary import Difference, by_prompt, differences, summarize
from verl_tasks.evaluation.tables import all_sizes, comparison_table, markdown_table, markdown_text, p_text, show_table
from verl_tasks.files import write_json, write_text
from verl_tasks.runs.folder import run_of
from verl_tasks.runs.run import read_metrics, recorded
from verl_tasks.settings import REPORTING, Settings, artifacts, fingerprint
from verl_tasks.text import show

START = "start"
SWEPT = {"METHOD", "LR", "TRAIN_SEED"}
CHOSEN_BY = "score"  # the mean reward picks a method's rate


@dataclass(frozen=True)
class Arm:
    """The trainings of one method with one rate, by seed: the labels of their models, ``METHOD@RATE#SEED``."""

    name: str
    method: str
    rate: float
    labels: tuple[str, ...]


def arms_of(labels: list[str]) -> list[Arm]:
    """The arms of an experiment, in order; names include the rate if there are several."""
    found: dict[tuple[str, float], list[str]] = {}
    for label in labels:
        method, _, rest = label.partition("@")
        found.setdefault((method, float(rest.partition("#")[0])), []).append(label)
    several = len({rate for _, rate in found}) > 1
    return [Arm(f"{m} LR {rate:g}" if several else m, m, rate, tuple(those)) for (m, rate), those in found.items()]


def training_figures(s: Settings, model: str) -> dict | None:
    """Steps, their mean and total seconds, the reward in their first and last quarter, the entropy at the end (nats per
    token), of the run that made ``model``; None if no run did."""
    if (run_dir := run_of(model, s.runs_dir)) is None:
        return None
    steps, none = pd.DataFrame(read_metrics(run_dir).values()), pd.Series(dtype=float)
    rewards, entropy = (steps.get(name, none).dropna() for name in ("critic/score/mean", "actor/entropy"))
    quarter, seconds = max(1, len(rewards) // 4), steps["timing_s/step"]
    figures = {"seconds": seconds.sum(), "seconds_per_step": seconds.mean(), "entropy_last": entropy[-1:].mean()}
    figures |= {"reward_first": rewards[:quarter].mean(), "reward_last": rewards[-quarter:].mean()}
    return {"steps": len(steps), **{name: float(value) for name, value in figures.items() if pd.notna(value)}}


def training_settings(s: Settings, arms: list[Arm], models: dict[str, str]) -> tuple[dict, dict[str, dict]]:
    """The settings that the trainings share, and by arm those that it does not. From the runs' records, for an arm
    trains with its method's defaults and the mini-batches of all; from ``s`` where no run made its model."""
    runs = {arm.name: run_of(models[arm.labels[0]], s.runs_dir) for arm in arms}
    made = {name: (recorded(run) if run else {}).get("settings") or asdict(s) for name, run in runs.items()}
    shown = [name for name in asdict(s) if name not in (REPORTING | SWEPT) - {"STEPS", "SELF_PLAY_ROUNDS"}]
    own = [name for name in shown if len({str(each.get(name)) for each in made.values()}) > 1]
    first = next(iter(made.values()))
    shared = {name: first.get(name) for name in shown if name not in own}
    return shared, {arm: {name: each.get(name) for name in own} for arm, each in made.items() if own}


def pooled(
    tables: dict[str, pd.DataFrame], right: tuple[str, ...], left: tuple[str, ...] = ()
) -> dict[str, Difference]:
    """Each metric of the models ``right`` (one per seed), minus that of ``left`` if given (one, or one per seed)."""
    those = [tables[label] for label in (*left, *right)]
    result = {}
    for name in [name for name in those[0] if all(name in table for table in those)]:
        values = pd.concat([table[name] for table in those], axis="columns").dropna().to_numpy().T  # (models, prompts)
        if values.shape[1] > 1:
            values = values[len(left) :] - values[: len(left)] if left else values
            result[name] = Difference(*pooled_mean(values), f"t, {values.shape[0]} seeds x {values.shape[1]} prompts")
    return result


def training_rows(arms: list[Arm], training: dict[str, dict]) -> list[list[str]]:
    """One row per arm: means over its seeds, and their total minutes."""
    rows = []
    for arm in arms:
        frame = pd.DataFrame(training[label] for label in arm.labels if label in training)
        if len(frame):
            mean, minutes = frame.mean(), frame["seconds"].sum() / 60
            row = [arm.name, str(len(frame)), f"{mean['steps']:g}", f"{mean['seconds_per_step']:.1f}", f"{minutes:.1f}"]
            ends = ("reward_first", "reward_last", "entropy_last")
            rows.append([*row, *(f"{mean[end]:.3f}" if end in mean else "-" for end in ends)])
    return rows


def experiment(s: Settings, scoring: Scoring, models: dict[str, str]) -> int:
    """Sample ``models`` (label to path: the start, then ``METHOD@RATE#SEED``) on the held-out prompts; print and write
    all metrics, and the paired differences of each method to the start and to the first one. dev.parquet picks the rate
    of a method with several; without it the test prompts do, and the report calls this an oracle. Returns the number of
    completions on which the reward raised."""
    root = artifacts() / "eval" / s.TASK
    arms = arms_of([label for label in models if label != START])
    rollouts = sampled({label: test_job(s, model) for label, model in models.items()}, root, scoring)
    tables = {label: by_prompt(found) for label, found in rollouts.items()}
    best, how = _chosen(s, scoring, models, arms, tables, root)
    pairs = _paired(list(best.values()), rollouts, tables, scoring)
    summaries = {label: summarize(found, scoring.own_metrics, scoring.most) for label, found in rollouts.items()}
    trained = [label for arm in arms for label in arm.labels]  # the start may be a warm-up, without rewards
    training = {label: figures for label in trained if (figures := training_figures(s, models[label]))}
    shown = {START: summaries[START]} | {arm.name: _summary(arm, summaries, tables) for arm in arms}

    folder = artifacts() / "experiments" / s.TASK / f"{'-'.join([START, *best])}-{fingerprint({'models': models})}"
    shared, own = training_settings(s, arms, models)
    found = {
        "models": models,
        "settings": shared,
        "settings_of_arms": own,
        "rates": {"chosen": {method: arm.rate for method, arm in best.items()}, "by": how},
        "training": training,
        "summaries": summaries,
        "arms": {arm.name: {"labels": arm.labels, **shown[arm.name]} for arm in arms},
        "differences": {
            pair: {
                name: asdict(each.difference) | {"p_value": each.p_value, "test": each.test}
                for name, each in changes.items()
            }
            for pair, changes in pairs.items()
        },
    }
    write_json(folder / "experiment.json", found)
    seeds = max(len(arm.labels) for arm in arms)
    title = f"{s.TASK}: {all_sizes(summaries)}{f', {seeds} seeds' if seeds > 1 else ''}; mean [95 % interval]"
    header = ["method", "runs", "steps", "s/step", "minutes", "reward, first quarter", "last quarter", "entropy, end"]
    change_rows = [
        [pair, name, each.difference.signed(), p_text(each.p_value), each.test]
        for pair, changes in pairs.items()
        for name, each in changes.items()
    ]
    report = [
        (title, *comparison_table(shown)),
        ("paired differences [95 % interval]", ["pair", "metric", "difference", "p", "test"], change_rows),
        ("training", header, training_rows(arms, training)),
    ]
    parts = [f"# {s.TASK}: {', '.join(shown)}", *(f"- {k}: {markdown_text(v)}" for k, v in models.items())]
    parts += [f"Rates chosen by {how}."] if how else []
    for name, *table in report:
        show_table(name, *table)
        parts += [f"## {name}", markdown_table(*table)]
    if how:
        show(f"rates: {', '.join(f'{name} {arm.rate:g}' for name, arm in best.items())}; chosen by {how}")
    parts += ["## settings", _listed(shared), *(f"- {arm}: {_listed(each)}" for arm, each in own.items())]
    write_text(folder / "experiment.md", "\n\n".join(parts) + "\n")
    show(f"{folder}/experiment.json, .md")
    return report_errors([r for each in rollouts.values() for r in each])


def _paired(best: list[Arm], rollouts: dict, tables: dict, scoring: Scoring) -> dict[str, dict[str, Difference]]:
    """The differences of each arm to the start, and of the others to the first one."""

    def minus(left: tuple[str, ...], right: tuple[str, ...]) -> dict[str, Difference]:
        if len(right) > 1:
            return pooled(tables, right, left)
        return differences(rollouts[left[0]], rollouts[right[0]], scoring.own_metrics)

    first, *others = best
    pairs = {f"{arm.name} - {START}": minus((START,), arm.labels) for arm in best}
    return pairs | {f"{arm.name} - {first.name}": minus(first.labels, arm.labels) for arm in others}


def _summary(arm: Arm, summaries: dict[str, dict], tables: dict[str, pd.DataFrame]) -> dict:
    """That of the arm's first seed; of several seeds with their pooled metrics."""
    if len(arm.labels) == 1:
        return summaries[arm.labels[0]]
    metrics = {name: asdict(each.difference) for name, each in pooled(tables, arm.labels).items()}
    return summaries[arm.labels[0]] | {"metrics": metrics}


def _listed(settings: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items() if value != "")


def _chosen(s: Settings, scoring: Scoring, models, arms: list[Arm], tables, root) -> tuple[dict[str, Arm], str]:
    """The arm of each method whose seeds have the highest mean reward, and on which prompts; "" without a choice."""
    methods, dev, how = dict.fromkeys(arm.method for arm in arms), s.data_dir / "dev.parquet", ""
    if len(arms) > len(methods) and dev.is_file():
        jobs = {label: test_job(s, models[label], dev) for arm in arms for label in arm.labels}
        tables = {label: by_prompt(rollouts) for label, rollouts in sampled(jobs, root, scoring).items()}
        how = f"the {CHOSEN_BY} on {dev.name}"
    elif len(arms) > len(methods):
        how = f"the {CHOSEN_BY} on these very test prompts: an oracle, too good to be true"
    mean = {arm: np.mean([tables[label][CHOSEN_BY].mean() for label in arm.labels]) for arm in arms}
    return {method: max((arm for arm in arms if arm.method == method), key=mean.get) for method in methods}, how
