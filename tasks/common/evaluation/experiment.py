"""`make experiment`: what several methods, rates and seeds made of the same start and data, side by side."""

from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from tasks.common.evaluation.rollouts import Rollout
from tasks.common.evaluation.sample import Scoring, report_errors, sampled, test_job
from tasks.common.evaluation.statistics import Estimate, pooled_mean
from tasks.common.evaluation.summary import Difference, by_prompt, differences, summarize
from tasks.common.evaluation.tables import comparison_rows, markdown_table, markdown_text, p_text, show_table, sizes
from tasks.common.files import write_json, written_beside
from tasks.common.runs.folder import read_metrics, run_of
from tasks.common.settings import REPORTING, Settings, artifacts, fingerprint

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
    """The arms of an experiment, in order; a name says the rate where a method has several."""
    found: dict[tuple[str, float], list[str]] = {}
    for label in labels:
        method, _, rest = label.partition("@")
        found.setdefault((method, float(rest.partition("#")[0])), []).append(label)
    several = len({rate for _, rate in found}) > 1
    names = {(method, rate): f"{method} LR {rate:g}" if several else method for method, rate in found}
    return [Arm(names[key], *key, tuple(those)) for key, those in found.items()]


def training_figures(s: Settings, model: str) -> dict | None:
    """Steps, their mean and total seconds, the reward in their first and last quarter, the entropy at the end (nats a
    token), of the run that made ``model``; None if no run did."""
    run_dir = run_of(model, s.runs_dir)
    if run_dir is None:
        return None
    steps = list(read_metrics(run_dir).values())
    rewards = [step["critic/score/mean"] for step in steps if "critic/score/mean" in step]
    quarter = max(1, len(rewards) // 4)
    ends = {"reward_first": rewards[:quarter], "reward_last": rewards[-quarter:]} if rewards else {}
    ends |= {"entropy_last": [step["actor/entropy"] for step in steps if "actor/entropy" in step][-1:]}
    seconds = [step["timing_s/step"] for step in steps]
    return {
        "steps": len(steps),
        "seconds": float(sum(seconds)),
        "seconds_a_step": float(np.mean(seconds)),
        **{name: float(np.mean(values)) for name, values in ends.items() if values},
    }


def stacked(tables: dict[str, pd.DataFrame], labels: tuple[str, ...], prompts: pd.Index, name: str) -> np.ndarray:
    """The metric ``name`` of some models, shape (models, prompts)."""
    return np.array([tables[label].loc[prompts, name] for label in labels])


def pooled_metrics(tables: dict[str, pd.DataFrame], arm: Arm) -> dict[str, Estimate]:
    """Each metric of an arm with several seeds."""
    those = [tables[label] for label in arm.labels]
    names = [name for name in those[0] if all(name in table for table in those)]
    prompts = {name: those[0].index[np.all([table[name].notna() for table in those], axis=0)] for name in names}
    return {name: pooled_mean(stacked(tables, arm.labels, prompts[name], name))[0] for name in names}


def pooled_differences(
    tables: dict[str, pd.DataFrame], left: tuple[str, ...], right: tuple[str, ...]
) -> dict[str, Difference]:
    """Each metric of ``right`` minus that of ``left``, paired by prompt; by seed too, unless ``left`` is one model."""
    those = [tables[label] for label in (*left, *right)]
    result = {}
    for name in [name for name in those[0] if all(name in table for table in those)]:
        whole = np.all([table[name].notna() for table in those], axis=0)
        prompts = those[0].index[whole]
        if len(prompts) > 1:
            change = stacked(tables, right, prompts, name) - stacked(tables, left, prompts, name)
            result[name] = Difference(*pooled_mean(change), f"t, {len(right)} seeds x {len(prompts)} prompts")
    return result


def chosen_rates(arms: list[Arm], tables: dict[str, pd.DataFrame]) -> dict[str, Arm]:
    """The arm of each method whose seeds have the highest mean reward on the prompts of ``tables``."""
    best: dict[str, Arm] = {}
    mean = {arm: np.mean([tables[label][CHOSEN_BY].mean() for label in arm.labels]) for arm in arms}
    for arm in arms:
        if arm.method not in best or mean[arm] > mean[best[arm.method]]:
            best[arm.method] = arm
    return best


def change_rows(changes: dict[str, dict[str, Difference]]) -> list[list[str]]:
    """One row a pair of arms and metric: pair, metric, difference with its interval, p-value and test."""
    return [
        [pair, name, change.estimate.signed(), p_text(change.p_value), change.test]
        for pair, by_metric in changes.items()
        for name, change in by_metric.items()
    ]


def training_rows(arms: list[Arm], training: dict[str, dict]) -> list[list[str]]:
    """One row an arm: means over its seeds, and all minutes of them."""
    rows = []
    for arm in arms:
        figures = [training[label] for label in arm.labels if label in training]
        if not figures:
            continue
        frame = pd.DataFrame(figures)
        ends = ("reward_first", "reward_last", "entropy_last")
        rows.append(
            [arm.name, str(len(figures)), f"{frame['steps'].mean():g}", f"{frame['seconds_a_step'].mean():.1f}"]
            + [f"{frame['seconds'].sum() / 60:.1f}"]
            + [f"{frame[end].mean():.3f}" if end in frame else "-" for end in ends]
        )
    return rows


def experiment(s: Settings, scoring: Scoring, models: dict[str, str]) -> int:
    """Sample ``models`` (label to path: the start, then ``METHOD@RATE#SEED``) on the held-out prompts; print and write
    all metrics, and the paired differences of each method to the start and to the first one.

    Where a method has several rates, dev.parquet picks one, and without it the test prompts do, which is said: an
    oracle. Returns the completions on which the reward raised.
    """
    root = artifacts() / "eval" / s.TASK
    arms = arms_of([label for label in models if label != START])
    rollouts, _ = sampled({label: test_job(s, model) for label, model in models.items()}, root, scoring)
    tables = {label: by_prompt(found) for label, found in rollouts.items()}
    best, how = _chosen(s, scoring, models, arms, tables, root)
    pairs = _pairs(list(best.values()), rollouts, tables, scoring)
    summaries = {label: summarize(found, scoring.own_metrics) for label, found in rollouts.items()}
    training = {label: figures for label in models if (figures := training_figures(s, models[label]))}
    shown = {START: summaries[START]} | {arm.name: _shown(arm, summaries, tables) for arm in arms}

    mark = fingerprint({"models": models})
    folder = artifacts() / "experiments" / s.TASK / f"{'-'.join([START, *best])}-{mark}"
    settings = {name: value for name, value in asdict(s).items() if name not in REPORTING | SWEPT}
    found = {
        "models": models,
        "settings": settings | {"STEPS": s.STEPS, "SELF_PLAY_ROUNDS": s.SELF_PLAY_ROUNDS},
        "rates": {"chosen": {method: arm.rate for method, arm in best.items()}, "by": how},
        "training": training,
        "summaries": summaries,
        "arms": {arm.name: {"labels": arm.labels, **shown[arm.name]} for arm in arms},
        "differences": {
            pair: {
                name: asdict(change.estimate) | {"p_value": change.p_value, "test": change.test}
                for name, change in c.items()
            }
            for pair, c in pairs.items()
        },
    }
    write_json(folder / "experiment.json", found)
    seeds = max(len(arm.labels) for arm in arms)
    title = f"{s.TASK}: {sizes(summaries[START])}{f', {seeds} seeds' if seeds > 1 else ''}; mean [95 % interval]"
    header = ["method", "runs", "steps", "s/step", "minutes", "reward, first quarter", "last quarter", "entropy, end"]
    report = [
        (title, ["metric", *shown], comparison_rows(shown)),
        ("paired differences [95 % interval]", ["pair", "metric", "difference", "p", "test"], change_rows(pairs)),
        ("training", header, training_rows(arms, training)),
    ]
    for table in report:
        show_table(*table)
    if how:
        print(f"rates: {', '.join(f'{name} {arm.rate:g}' for name, arm in best.items())}; chosen by {how}")
    with written_beside(folder / "experiment.md") as partial:
        parts = [f"# {s.TASK}: {', '.join(shown)}", *(f"- {k}: {markdown_text(v)}" for k, v in models.items())]
        parts += [f"Rates chosen by {how}."] if how else []
        parts += [part for name, *table in report for part in (f"## {name}", markdown_table(*table))]
        parts += ["## settings", ", ".join(f"{k}={v}" for k, v in found["settings"].items() if v != "")]
        partial.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"{folder}/experiment.json, .md")
    return report_errors([r for each in rollouts.values() for r in each])


def _chosen(s: Settings, scoring: Scoring, models, arms: list[Arm], tables, root) -> tuple[dict[str, Arm], str]:
    """The arm of each method to compare, and by what it was chosen; empty where there was no choice."""
    if len(arms) == len({arm.method for arm in arms}):
        return {arm.method: arm for arm in arms}, ""
    dev = s.data_dir / "dev.parquet"
    if not dev.is_file():
        return chosen_rates(arms, tables), f"the {CHOSEN_BY} on these very test prompts: an oracle, too good to be true"
    labels = [label for arm in arms for label in arm.labels]
    found, _ = sampled({label: test_job(s, models[label], dev) for label in labels}, root, scoring)
    return chosen_rates(arms, {label: by_prompt(rollouts) for label, rollouts in found.items()}), (
        f"the {CHOSEN_BY} on {dev.name}"
    )


def _pairs(arms: list[Arm], rollouts: dict[str, list[Rollout]], tables, scoring: Scoring) -> dict:
    """The differences of each of ``arms`` to the start, and of the others to the first."""

    def difference(left: tuple[str, ...], right: tuple[str, ...]) -> dict[str, Difference]:
        if len(right) > 1:
            return pooled_differences(tables, left, right)
        return differences(rollouts[left[0]], rollouts[right[0]], scoring.own_metrics)

    first, *others = arms
    to_start = {f"{arm.name} - {START}": difference((START,), arm.labels) for arm in arms}
    return to_start | {f"{arm.name} - {first.name}": difference(first.labels, arm.labels) for arm in others}


def _shown(arm: Arm, summaries: dict[str, dict], tables: dict[str, pd.DataFrame]) -> dict:
    """The summary of an arm: that of its only model, or its seeds pooled."""
    summary = summaries[arm.labels[0]]
    if len(arm.labels) == 1:
        return summary
    return summary | {"metrics": {name: asdict(value) for name, value in pooled_metrics(tables, arm).items()}}
