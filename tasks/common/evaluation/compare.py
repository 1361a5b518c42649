"""`make compare`: base, warm-up and trained on the same prompts, and the training's own paired difference."""

from dataclasses import asdict

import pandas as pd

from verl_tasks.evaluation import tables
from verl_tasks.evaluation.rollouts import GREEDY, SAMPLED, Rollout
from verl_tasks.evaluation.sample import Scoring, model_name, report_errors, sampled, test_job
from verl_tasks.evaluation.statistics import mcnemar
from verl_tasks.evaluation.summary import Difference, by_prompt, conversations_of, differences, summarize
from verl_tasks.files import write_json, write_text
from verl_tasks.settings import Settings, artifacts
from verl_tasks.text import one_line, show

LABELS = ("base", "warm-up", "trained")
SHOWN = 20  # gained and lost prompts in the Markdown report; the JSON has all


def shown_responses(rollouts: list[Rollout]) -> dict[int, Rollout]:
    """The response that represents each prompt: the greedy one, else the first sample."""
    mode = GREEDY if any(r.mode == GREEDY for r in rollouts) else SAMPLED
    return {r.index: r for r in rollouts if r.mode == mode and r.sample == 0}


def result(
    rollouts: dict[str, list[Rollout]], models: dict[str, str], scoring: Scoring
) -> tuple[dict, dict[str, Difference]]:
    """The content of compare.json: each model's summary by label, the model that the trained one is paired ``against``,
    each metric's difference and test, prompts gained and lost. Their test's p-value is None where some prompts are
    turns of one conversation: the test is of independent prompts. Also the differences by metric."""
    *_, before, trained = models
    summaries = {label: summarize(each, scoring.own_metrics, scoring.most) for label, each in rollouts.items()}
    changes = differences(rollouts[before], rollouts[trained], scoring.own_metrics)
    left, right = (
        {index: r.reward["acc"] > 0 for index, r in shown_responses(rollouts[label]).items() if r.reward}
        for label in (before, trained)
    )
    both = sorted(left.keys() & right.keys())
    changed = [index for index in both if left[index] != right[index]]
    gained, lost = ([index for index in changed if right[index] == better] for better in (True, False))
    independent = conversations_of(rollouts[before] + rollouts[trained])[both].is_unique
    p_value = mcnemar(len(gained), len(lost)) if independent else None
    found = {
        **{label: {"model": models[label], **summaries[label]} for label in models},
        "against": before,
        "metrics": {
            name: {label: summaries[label]["metrics"].get(name) for label in models} | asdict(change)
            for name, change in changes.items()
        },
        "mcnemar": {"gained": len(gained), "lost": len(lost), "p_value": p_value},
        "gained": gained,
        "lost": lost,
    }
    return found, changes


def prompt_text(rollout: Rollout) -> str:
    """The last message of a prompt: the system message is the same for all."""
    return str(rollout.prompt[-1]["content"]) if rollout.prompt else ""


def markdown(task: str, found: dict, changes: dict[str, Difference], texts: dict[int, str]) -> str:
    """compare.md."""
    summaries = {label: found[label] for label in LABELS if label in found}
    pair = f"trained - {found['against']}"
    parts = [
        f"# {task}: {', '.join(summaries)}",
        "\n".join(f"- {tables.markdown_text(line)}" for line in tables.outcome(pair, summaries, changes)),
        "\n".join(
            f"- {label}: {tables.markdown_text(each['model'])}, {tables.sizes(each)}"
            for label, each in summaries.items()
        ),
        tables.markdown_table(*tables.comparison_table(summaries, changes, pair, meanings=True)),
        "Differences are paired by prompt, over the prompts that both models answered: "
        f"{tables.gained_text(found['mcnemar'])}.",
    ]
    for name in ("gained", "lost"):
        shown = [f"- {index}: {tables.markdown_text(texts[index])}" for index in found[name][:SHOWN]]
        if (more := len(found[name]) - SHOWN) > 0:
            shown.append(f"- and {more} more in compare.json")
        parts += [f"## Prompts {name} ({len(found[name])})", "\n".join(shown) or "none"]
    return "\n\n".join(filter(None, parts)) + "\n"


def sheet(rollouts: dict[str, list[Rollout]], by_model: dict[str, pd.DataFrame], found: dict) -> pd.DataFrame:
    """The rows of compare.xlsx, one per prompt: metrics (``by_model``: from ``by_prompt``) and shown responses."""
    shown = {label: shown_responses(each) for label, each in rollouts.items()}
    first = {index: r for responses in shown.values() for index, r in responses.items()}
    change = {index: name for name in ("gained", "lost") for index in found[name]}
    rows = [[i, prompt_text(first[i]), first[i].ground_truth, change.get(i)] for i in sorted(first)]
    frame = pd.DataFrame(rows, sorted(first), ["index", "prompt", "ground_truth", "change"])
    metrics = [name for name in by_model["base"] if all(name in table for table in by_model.values())]
    for label, responses in shown.items():
        texts = pd.DataFrame({index: [r.response, r.error] for index, r in responses.items()}, ["response", "error"])
        frame = frame.join(by_model[label][metrics].join(texts.T, how="outer").add_prefix(f"{label} "))
    return frame


def compare(s: Settings, scoring: Scoring, base: str, *warm_up_and_trained: str) -> int:
    """Sample the models (base, perhaps the warm-up, trained) on the same prompts with the same settings and seed, and
    write compare.json, .md, .png and .xlsx; the same rollouts give the same bytes. Returns the number of completions on
    which the reward raised."""
    labels = LABELS if len(warm_up_and_trained) > 1 else ("base", "trained")
    models = dict(zip(labels, (base, *warm_up_and_trained), strict=True))
    root = artifacts() / "eval" / s.TASK
    jobs = {label: test_job(s, model) for label, model in models.items()}
    once = {job: label for label, job in jobs.items()}  # the same model is sampled once: it has one file
    found_once = sampled({label: job for job, label in once.items()}, root, scoring)
    rollouts = {label: found_once[once[job]] for label, job in jobs.items()}
    folder = artifacts() / "compare" / s.TASK / "--".join(job.folder(root).name for job in jobs.values())
    found, changes = result(rollouts, models, scoring)
    summaries, pair = {label: found[label] for label in models}, f"trained - {found['against']}"

    write_json(folder / "compare.json", found)
    texts = {r.index: prompt_text(r) for each in rollouts.values() for r in each}
    write_text(folder / "compare.md", markdown(s.TASK, found, changes, texts))
    by_model = {label: by_prompt(each) for label, each in rollouts.items()}
    before, trained = (by_model[label].get("score", pd.Series(dtype=float)) for label in (found["against"], "trained"))
    sizes = tables.all_sizes(summaries)
    # Only here: `make eval` draws nothing and writes no spreadsheet.
    from verl_tasks.evaluation import plots
    from verl_tasks.evaluation.spreadsheet import write_xlsx

    plots.compare_png(summaries, (trained - before).dropna(), f"{s.TASK}: {sizes}", folder / "compare.png")
    write_xlsx(folder / "compare.xlsx", sheet(rollouts, by_model, found), "prompts")

    title = f"{s.TASK}: {' -> '.join(map(model_name, models.values()))}; {sizes}"
    tables.show_table(title, *tables.comparison_table(summaries, changes, pair))
    lines = [*tables.outcome(pair, summaries, changes), tables.gained_text(found["mcnemar"])]
    for name in ("gained", "lost"):
        lines += [f"  {name} {index}: {one_line(texts[index])}" for index in found[name][:3]]
    show("\n".join([*lines, f"{folder}/compare.json, .md, .png, .xlsx"]))
    return report_errors([r for each in found_once.values() for r in each])
