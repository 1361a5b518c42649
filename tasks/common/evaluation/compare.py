"""`make compare`: base, warm-up and trained on the same prompts, and what the training itself has brought.

The paired difference is that of the trained model to what its training began with: the warm-up if there was one.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from tasks.common.evaluation import plots
from tasks.common.evaluation.rollouts import GREEDY, SAMPLED, Rollout
from tasks.common.evaluation.sample import Scoring, model_name, report_errors, sampled, test_job
from tasks.common.evaluation.spreadsheet import write_xlsx
from tasks.common.evaluation.statistics import mcnemar
from tasks.common.evaluation.summary import (
    Difference,
    by_prompt,
    changes_as_dicts,
    differences,
    right_by_prompt,
    summarize,
)
from tasks.common.evaluation.tables import (
    comparison_rows,
    markdown_table,
    markdown_text,
    meaning,
    p_text,
    show_table,
    sizes,
)
from tasks.common.evaluation.verdict import gain, headline
from tasks.common.files import write_json, written_beside
from tasks.common.settings import Settings, artifacts
from tasks.common.text import one_line

WARM_UP = "warm-up"  # its label
SHOWN = 20  # gained and lost prompts in the Markdown report; the JSON has all


def gained_and_lost(base: list[Rollout], trained: list[Rollout]) -> tuple[list[int], list[int]]:
    """Prompts that only the trained model answers right, and those that only the base does (``right_by_prompt``)."""
    left, right = right_by_prompt(base), right_by_prompt(trained)
    both = sorted(left.keys() & right.keys())
    return [i for i in both if right[i] and not left[i]], [i for i in both if left[i] and not right[i]]


def labels_of(models: dict) -> list[str]:
    """Which of base, warm-up and trained there are, in that order."""
    return [label for label in ("base", WARM_UP, "trained") if label in models]


def result(
    rollouts: dict[str, list[Rollout]], models: dict[str, str], scoring: Scoring
) -> tuple[dict, dict[str, Difference]]:
    """What compare.json holds: each model's summary by its label (``labels_of``), ``against`` which of them the trained
    one is paired, each metric's difference and test, prompts gained and lost. And the differences by metric."""
    labels = labels_of(models)
    before = labels[-2]
    summaries = {label: summarize(rollouts[label], scoring.own_metrics) for label in labels}
    changes = differences(rollouts[before], rollouts["trained"], scoring.own_metrics)
    gained, lost = gained_and_lost(rollouts[before], rollouts["trained"])
    found = {
        **{label: {"model": models[label], **summaries[label]} for label in labels},
        "against": before,
        "metrics": {
            name: {label: summaries[label]["metrics"].get(name) for label in labels} | change
            for name, change in changes_as_dicts(changes).items()
        },
        "mcnemar": {"gained": len(gained), "lost": len(lost), "p_value": mcnemar(len(gained), len(lost))},
        "gained": gained,
        "lost": lost,
    }
    return found, changes


def prompt_text(rollout: Rollout) -> str:
    """The last message of a prompt: the system message is the same for all."""
    return str(rollout.prompt[-1]["content"]) if rollout.prompt else ""


def markdown(task: str, found: dict, changes: dict[str, Difference], texts: dict[int, str]) -> str:
    """compare.md."""
    labels = labels_of(found)
    rows = [[*row, meaning(row[0])] for row in comparison_rows({label: found[label] for label in labels}, changes)]
    test, pair = found["mcnemar"], f"trained - {found['against']}"
    name = headline(changes)
    parts = [
        f"# {task}: {', '.join(labels)}",
        *([markdown_text(gain(pair, name, changes[name]))] if name else []),
        "\n".join(f"- {label}: {markdown_text(found[label]['model'])}, {sizes(found[label])}" for label in labels),
        markdown_table(["metric", *labels, f"{pair} [95 % interval]", "p", "meaning"], rows),
        "A difference is taken prompt by prompt, over the prompts that both models answered: "
        f"{test['gained']} prompts gained, {test['lost']} lost: exact McNemar p = {p_text(test['p_value'])}.",
    ]
    for name in ("gained", "lost"):
        parts.append(f"## Prompts {name} ({len(found[name])})")
        shown = [f"- {index}: {markdown_text(texts[index])}" for index in found[name][:SHOWN]]
        more = len(found[name]) - SHOWN
        parts.append("\n".join([*shown, *([f"- and {more} more in compare.json"] if more > 0 else [])]) or "none")
    return "\n\n".join(parts) + "\n"


def sheet(
    rollouts: dict[str, list[Rollout]], tables: dict[str, pd.DataFrame], gained: list[int], lost: list[int]
) -> tuple[list[str], list]:
    """Columns and rows of compare.xlsx: one row a prompt, with each model's response that stands for it; ``tables``:
    each model's ``by_prompt``."""
    mode = GREEDY if any(r.mode == GREEDY for r in rollouts["base"]) else SAMPLED
    shown = [{r.index: r for r in found if r.mode == mode and r.sample == 0} for found in rollouts.values()]
    metrics = [name for name in tables["base"] if all(name in table for table in tables.values())]
    columns = ["index", "prompt", "ground_truth", "change"]
    for label in rollouts:
        columns += [*(f"{label} {name}" for name in metrics), f"{label} response", f"{label} error"]
    rows = []
    for index in sorted(set().union(*shown)):
        first = next(responses[index] for responses in shown if index in responses)
        change = "gained" if index in gained else "lost" if index in lost else ""
        row = [index, prompt_text(first), first.ground_truth, change]
        for table, responses in zip(tables.values(), shown, strict=True):
            values = [float(table.at[index, name]) if index in table.index else None for name in metrics]
            row += [value if value == value else None for value in values]  # NaN: an empty cell
            response = responses.get(index)
            row += [response.response, response.error] if response else [None, None]
        rows.append(row)
    return columns, rows


def write_reports(
    folder: Path, task: str, rollouts: dict[str, list[Rollout]], models: dict[str, str], scoring: Scoring
) -> tuple[dict, dict[str, Difference]]:
    """compare.json, .md, .png and .xlsx in ``folder``; the same rollouts give the same bytes. Returns ``result``."""
    found, changes = result(rollouts, models, scoring)
    texts = {r.index: prompt_text(r) for each in rollouts.values() for r in each}
    write_json(folder / "compare.json", found)
    with written_beside(folder / "compare.md") as partial:
        partial.write_text(markdown(task, found, changes, texts), encoding="utf-8")
    tables = {label: by_prompt(each) for label, each in rollouts.items()}
    before, trained = tables[found["against"]], tables["trained"]
    both = "score" in before and "score" in trained
    change = (trained["score"] - before["score"]).dropna().to_numpy() if both else np.zeros(0)
    summaries = {label: found[label] for label in labels_of(found)}
    plots.compare_png(summaries, change, f"{task}: {sizes(found['trained'])}", folder / "compare.png")
    write_xlsx(folder / "compare.xlsx", *sheet(rollouts, tables, found["gained"], found["lost"]), "prompts")
    return found, changes


def compare(s: Settings, scoring: Scoring, base: str, *warm_up_and_trained: str) -> int:
    """Sample the models (base, perhaps the warm-up, trained) on the same prompts with the same settings and seed, and
    report the paired difference.

    Returns the number of completions on which the reward raised.
    """
    labels = ("base", WARM_UP, "trained") if len(warm_up_and_trained) > 1 else ("base", "trained")
    models = dict(zip(labels, (base, *warm_up_and_trained), strict=True))
    root = artifacts() / "eval" / s.TASK
    jobs = {label: test_job(s, model) for label, model in models.items()}
    once = {job: label for label, job in jobs.items()}  # the same model is sampled once: it has one file
    found_once, _ = sampled({label: job for job, label in once.items()}, root, scoring)
    rollouts = {label: found_once[once[job]] for label, job in jobs.items()}
    folder = artifacts() / "compare" / s.TASK / "--".join(job.folder(root).name for job in jobs.values())
    found, changes = write_reports(folder, s.TASK, rollouts, models, scoring)
    pair = f"trained - {found['against']}"
    title = f"{s.TASK}: {' -> '.join(map(model_name, models.values()))}; {sizes(found['trained'])}"
    rows = comparison_rows({label: found[label] for label in models}, changes)
    show_table(title, ["metric", *models, f"{pair} [95 % interval]", "p"], rows)
    if name := headline(changes):
        print(gain(pair, name, changes[name]))
    test = found["mcnemar"]
    print(f"prompts gained {test['gained']}, lost {test['lost']}: exact McNemar p = {p_text(test['p_value'])}")
    texts = {r.index: one_line(prompt_text(r)) for r in rollouts["base"]}
    for name in ("gained", "lost"):
        for index in found[name][:3]:
            print(f"  {name} {index}: {texts[index]}")
    print(f"{folder}/compare.json, .md, .png, .xlsx")
    return report_errors([r for label in once.values() for r in rollouts[label]])
