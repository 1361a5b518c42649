"""`make experiment`: several methods with the same start, data and settings, side by side."""

from dataclasses import asdict

import numpy as np

from tasks.common.evaluation.sample import Scoring, report_errors, sampled, test_job
from tasks.common.evaluation.summary import Difference, differences, summarize
from tasks.common.evaluation.tables import comparison_rows, markdown_table, markdown_text, p_text, show_table, sizes
from tasks.common.files import write_json, written_beside
from tasks.common.runs.folder import read_metrics, run_of
from tasks.common.settings import REPORTING, Settings, artifacts, fingerprint


def training_figures(s: Settings, model: str) -> dict | None:
    """Steps, mean seconds a step and the reward in the first and last quarter of the steps of the run that made
    ``model``; None if no run did."""
    run_dir = run_of(model, s.runs_dir)
    if run_dir is None:
        return None
    steps = list(read_metrics(run_dir).values())
    rewards = [step["critic/score/mean"] for step in steps if "critic/score/mean" in step]
    quarter = max(1, len(rewards) // 4)
    ends = {"reward_first": rewards[:quarter], "reward_last": rewards[-quarter:]} if rewards else {}
    return {
        "steps": len(steps),
        "seconds_a_step": float(np.mean([step["timing_s/step"] for step in steps])),
        **{name: float(np.mean(values)) for name, values in ends.items()},
    }


def change_rows(changes: dict[str, dict[str, Difference]]) -> list[list[str]]:
    """One row a pair of models and metric: pair, metric, difference with its interval, p-value and test."""
    return [
        [pair, name, change.estimate.signed(), p_text(change.p_value), change.test]
        for pair, by_metric in changes.items()
        for name, change in by_metric.items()
    ]


def experiment(s: Settings, scoring: Scoring, models: dict[str, str]) -> int:
    """Sample ``models`` (label to path, the start first) on the held-out prompts; print and write all metrics and the
    paired differences of each to the start and to the first method. Returns the completions on which the reward raised.
    """
    root = artifacts() / "eval" / s.TASK
    jobs = {label: test_job(s, model) for label, model in models.items()}
    rollouts, _ = sampled(jobs, root, scoring)
    summaries = {label: summarize(found, scoring.own_metrics) for label, found in rollouts.items()}
    start, first, *others = models
    pairs = [(start, label) for label in (first, *others)] + [(first, label) for label in others]
    changes = {
        f"{right} - {left}": differences(rollouts[left], rollouts[right], scoring.own_metrics) for left, right in pairs
    }
    training = {label: figures for label in models if (figures := training_figures(s, models[label]))}
    settings = {name: value for name, value in asdict(s).items() if name not in REPORTING | {"METHOD"}}
    folder = artifacts() / "experiments" / s.TASK / f"{'-'.join(models)}-{fingerprint({'models': models})}"
    found = {
        "models": models,
        "settings": settings | {"STEPS": s.STEPS, "SELF_PLAY_ROUNDS": s.SELF_PLAY_ROUNDS},
        "training": training,
        "summaries": summaries,
        "differences": {
            pair: {
                name: asdict(change.estimate) | {"p_value": change.p_value, "test": change.test}
                for name, change in c.items()
            }
            for pair, c in changes.items()
        },
    }
    write_json(folder / "experiment.json", found)
    title = f"{s.TASK}: {sizes(summaries[first])}; mean [95 % interval]"
    tables = [
        (title, ["metric", *models], comparison_rows(summaries)),
        ("paired differences [95 % interval]", ["pair", "metric", "difference", "p", "test"], change_rows(changes)),
        (
            "training",
            ["method", "steps", "s/step", "reward, first quarter", "last quarter"],
            [
                [label, str(f["steps"]), f"{f['seconds_a_step']:.1f}"]
                + [f"{f[end]:.3f}" if end in f else "-" for end in ("reward_first", "reward_last")]
                for label, f in training.items()
            ],
        ),
    ]
    for table in tables:
        show_table(*table)
    with written_beside(folder / "experiment.md") as partial:
        parts = [f"# {s.TASK}: {', '.join(models)}", *(f"- {k}: {markdown_text(v)}" for k, v in models.items())]
        parts += [part for name, *table in tables for part in (f"## {name}", markdown_table(*table))]
        parts += ["## settings", ", ".join(f"{k}={v}" for k, v in found["settings"].items() if v != "")]
        partial.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"{folder}/experiment.json, .md")
    return report_errors([r for each in rollouts.values() for r in each])
