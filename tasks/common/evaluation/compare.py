"""`make compare`: base against trained, prompt by prompt, with the p-values of the differences."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from tasks.common.evaluation import plots
from tasks.common.evaluation.rollouts import GREEDY, SAMPLED, Rollout
from tasks.common.evaluation.sample import Scoring, model_name, report_errors, sampled, test_job
from tasks.common.evaluation.spreadsheet import write_xlsx
from tasks.common.evaluation.statistics import mcnemar
from tasks.common.evaluation.summary import Difference, by_prompt, differences, right_by_prompt, summarize
from tasks.common.evaluation.tables import (
    comparison_rows,
    markdown_table,
    markdown_text,
    meaning,
    p_text,
    show_table,
    sizes,
)
from tasks.common.files import write_json, written_beside
from tasks.common.settings import Settings, artifacts
from tasks.common.text import one_line

SHOWN = 20  # gained and lost prompts in the Markdown report; the JSON has all


def gained_and_lost(base: list[Rollout], trained: list[Rollout]) -> tuple[list[int], list[int]]:
    """Prompts that only the trained model answers right, and those that only the base does (``right_by_prompt``)."""
    left, right = right_by_prompt(base), right_by_prompt(trained)
    both = sorted(left.keys() & right.keys())
    return [i for i in both if right[i] and not left[i]], [i for i in both if left[i] and not right[i]]


def result(
    base: list[Rollout], trained: list[Rollout], names: tuple[str, str], scoring: Scoring
) -> tuple[dict, dict[str, Difference]]:
    """What compare.json holds (both summaries, each metric's difference and test, prompts gained and lost), and the
    differences by metric."""
    summaries = [summarize(rollouts, scoring.own_metrics) for rollouts in (base, trained)]
    changes = differences(base, trained, scoring.own_metrics)
    gained, lost = gained_and_lost(base, trained)
    found = {
        "base": {"model": names[0], **summaries[0]},
        "trained": {"model": names[1], **summaries[1]},
        "metrics": {
            name: {
                "base": summaries[0]["metrics"][name],
                "trained": summaries[1]["metrics"][name],
                "difference": asdict(change.estimate),
                "p_value": change.p_value,
                "test": change.test,
            }
            for name, change in changes.items()
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
    summaries = {"base": found["base"], "trained": found["trained"]}
    rows = [[*row, meaning(row[0])] for row in comparison_rows(summaries, changes)]
    test = found["mcnemar"]
    parts = [
        f"# {task}: base against trained",
        f"- base: {markdown_text(found['base']['model'])}, {sizes(found['base'])}",
        f"- trained: {markdown_text(found['trained']['model'])}, {sizes(found['trained'])}",
        markdown_table(["metric", "base", "trained", "difference [95 % interval]", "p", "meaning"], rows),
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
    base: list[Rollout], trained: list[Rollout], tables: list[pd.DataFrame], gained: list[int], lost: list[int]
) -> tuple[list[str], list]:
    """Columns and rows of compare.xlsx: one row a prompt, with the response that stands for it; ``tables``: both
    models' ``by_prompt``."""
    mode = GREEDY if any(r.mode == GREEDY for r in base) else SAMPLED
    shown = [{r.index: r for r in rollouts if r.mode == mode and r.sample == 0} for rollouts in (base, trained)]
    metrics = [name for name in tables[0] if name in tables[1]]
    columns = ["index", "prompt", "ground_truth", "change"]
    for label in ("base", "trained"):
        columns += [*(f"{label} {name}" for name in metrics), f"{label} response", f"{label} error"]
    rows = []
    for index in sorted(shown[0].keys() | shown[1].keys()):
        first = shown[0].get(index) or shown[1][index]
        change = "gained" if index in gained else "lost" if index in lost else ""
        row = [index, prompt_text(first), first.ground_truth, change]
        for table, responses in zip(tables, shown, strict=True):
            values = [float(table.at[index, name]) if index in table.index else None for name in metrics]
            row += [value if value == value else None for value in values]  # NaN: an empty cell
            response = responses.get(index)
            row += [response.response, response.error] if response else [None, None]
        rows.append(row)
    return columns, rows


def write_reports(folder: Path, task: str, base: list[Rollout], trained: list[Rollout], names, scoring: Scoring):
    """compare.json, .md, .png and .xlsx in ``folder``; the same rollouts give the same bytes. Returns ``result``."""
    found, changes = result(base, trained, names, scoring)
    texts = {r.index: prompt_text(r) for r in base + trained}
    write_json(folder / "compare.json", found)
    with written_beside(folder / "compare.md") as partial:
        partial.write_text(markdown(task, found, changes, texts), encoding="utf-8")
    tables = [by_prompt(rollouts) for rollouts in (base, trained)]
    both = all("score" in table for table in tables)
    change = (tables[1]["score"] - tables[0]["score"]).dropna().to_numpy() if both else np.zeros(0)
    summaries = {"base": found["base"], "trained": found["trained"]}
    plots.compare_png(summaries, change, f"{task}: {sizes(found['trained'])}", folder / "compare.png")
    write_xlsx(folder / "compare.xlsx", *sheet(base, trained, tables, found["gained"], found["lost"]), "prompts")
    return found, changes


def compare(s: Settings, scoring: Scoring, base: str, trained: str) -> int:
    """Sample both models on the same prompts with the same settings and seed, and report the paired difference.

    Returns the number of completions on which the reward raised.
    """
    root = artifacts() / "eval" / s.TASK
    jobs = {"base": test_job(s, base), "trained": test_job(s, trained)}
    if jobs["base"] == jobs["trained"]:  # one file: sample it once
        rollouts, _ = sampled({"base": jobs["base"]}, root, scoring)
        rollouts["trained"] = rollouts["base"]
    else:
        rollouts, _ = sampled(jobs, root, scoring)
    folder = artifacts() / "compare" / s.TASK / "--".join(job.folder(root).name for job in jobs.values())
    found, changes = write_reports(folder, s.TASK, rollouts["base"], rollouts["trained"], (base, trained), scoring)
    summaries = {"base": found["base"], "trained": found["trained"]}
    rows = [[name, f"{left} -> {right}", *rest] for name, left, right, *rest in comparison_rows(summaries, changes)]
    title = f"{s.TASK}: {model_name(base)} -> {model_name(trained)}; {sizes(found['trained'])}"
    show_table(title, ["metric", "base -> trained", "difference [95 % interval]", "p"], rows)
    test = found["mcnemar"]
    print(f"prompts gained {test['gained']}, lost {test['lost']}: exact McNemar p = {p_text(test['p_value'])}")
    texts = {r.index: one_line(prompt_text(r)) for r in rollouts["base"]}
    for name in ("gained", "lost"):
        for index in found[name][:3]:
            print(f"  {name} {index}: {texts[index]}")
    print(f"{folder}/compare.json, .md, .png, .xlsx")
    return report_errors(rollouts["base"] + rollouts["trained"])
