"""`make probe`: does the training data have signal for this model? Run it before spending GPU hours on training."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from verl_tasks.ends import CUT, advice
from verl_tasks.evaluation import summary
from verl_tasks.evaluation.rollouts import Rollout
from verl_tasks.evaluation.sample import Job, Scoring, bounds, model_name, report_errors, sampled, sampling
from verl_tasks.evaluation.statistics import Estimate, bootstrap_mean
from verl_tasks.evaluation.tables import show_table, sizes
from verl_tasks.files import write_json
from verl_tasks.rows import DataError, read_rows, write_parquet
from verl_tasks.runs.folder import run_of
from verl_tasks.runs.run import recorded
from verl_tasks.settings import Command, Settings, SettingsError, artifacts
from verl_tasks.text import show

RARE = 0.03  # accuracy of a start below which RL sees too few right answers; from 0.042 it learned (docs/TUNING.md)
MOSTLY = 0.5  # share of samples that are cut off above which that is why few are right
UPSIDE_DOWN = "right samples earn no more than wrong ones of the same prompt"
SMALL = "small, but of most prompts the samples differ: enough where a method divides by their deviation, as GRPO does"


@dataclass(frozen=True)
class Verdict:
    """A value, its threshold, and the conclusion."""

    name: str
    value: float
    threshold: str
    good: bool
    words: str


def by_prompt(rollouts: list[Rollout]) -> pd.DataFrame:
    """One row per prompt, from the scored samples: ``samples``, ``accuracy``, ``score``, its population
    ``variance``, ``entropy`` (nats), ``truncated``, and the ``pull``: GRPO's mean absolute advantage, 0 to 1."""
    table = summary.by_prompt(rollouts)
    scored = ((r["index"], r["reward"]["score"]) for r in summary.as_dicts(rollouts))
    scores = pd.DataFrame(scored, columns=["index", "score"]).groupby("index")["score"]
    # By definition, equal scores give exactly 0.
    variance = scores.agg(lambda s: np.var(s) if np.ptp(s) else 0.0)
    pull = scores.agg(lambda s: np.abs(s - s.mean()).mean() / np.std(s) if np.ptp(s) else 0.0)
    parts = {"samples": scores.size(), "accuracy": table["pass@1"], "score": table["score"]}
    parts |= {"variance": variance, "entropy": table["entropy"], "truncated": table["truncated"]}
    return pd.DataFrame(parts | {"pull": pull})


def partial_credit(prompts: pd.DataFrame) -> float:
    """The share of GRPO's signal, of the ``pull`` of all ``prompts``, that comes from prompts without a right sample.

    GRPO divides by a group's standard deviation (DeepSeekMath, arXiv 2402.03300): 0.1 beside 0 pulls as 1 beside 0."""
    whole = prompts["pull"].sum()
    return float(prompts.loc[prompts["accuracy"] == 0, "pull"].sum() / whole) if whole else 0.0


def premium(rollouts: list[Rollout]) -> float:
    """What right samples earn more than wrong ones of the same prompt, in the mean; NaN where no prompt has both."""
    scored = [(r["index"], r["reward"]["acc"] > 0, r["reward"]["score"]) for r in summary.as_dicts(rollouts)]
    table = pd.DataFrame(scored, columns=["index", "right", "score"]).pivot_table("score", "index", "right")
    return float(np.mean(table.get(True, np.nan) - table.get(False, np.nan)))


def verdicts(
    accuracy: float,
    variance: float,
    entropy: float,
    zero_variance: float,
    partial: float,
    truncated: float,
    earns: float,
    cuts: str,
    warmed: bool,
) -> list[Verdict]:
    """The values against the thresholds that practitioners use; all but entropy (nats) and variance are shares.

    ``earns``: the ``premium``. ``cuts``: what cut responses off (ends.py, advice). ``warmed``: it is a warm-up."""
    first = f"{_first(warmed)}, or take easier data"
    hidden = "low, as most samples are cut off (below)" if truncated > MOSTLY else ""
    accuracy_words = (
        hidden or f"too hard for this model: {first} or a stronger model",
        hidden or f"low: few samples are right to learn from; {first}",
        "good: right and wrong samples to tell apart",
        "high: little is left to learn; harder data, or FILTER=1",
        "too easy for this model: take harder data",
    )[(accuracy >= RARE) + (accuracy >= 0.1) + (accuracy > 0.8) + (accuracy > 0.95)]
    upside_down, differ = earns <= 0, zero_variance < 0.5
    variance_words = "good: the samples of a prompt differ in reward"
    if upside_down:
        variance_words = UPSIDE_DOWN
    elif variance <= 0.05:
        variance_words = SMALL if differ else "low: the samples of a prompt score alike"
    entropy_words = (
        "low: it repeats itself, RL finds nothing new",
        "good: it explores",
        f"high: it guesses; {_first(warmed)}",
    )[(entropy >= 0.2) + (entropy > 0.8)]
    groups = "these groups give GRPO no gradient"
    zero_words = (f"{groups}: FILTER=1 drops their prompts", groups)
    if zero_variance == 1:
        lacking = "no signal: the samples of each prompt score alike"
    elif not accuracy:  # then to pay right answers alone would leave nothing
        lacking = f"no sample is right, so partial credit is all there is: {first}"
    else:
        lacking = "from partial credit alone: unless scores have degrees, it may teach to give up; "
        lacking += "pay right answers alone"
    partial_words = lacking, "good: prompts with right answers give most of what GRPO learns"
    cut_words = (f"cut off, so the reward sees no answer: {cuts}", "few responses are cut")
    of_right = partial < 0.5 and zero_variance < 1
    good = variance > 0.05 and not upside_down, 0.2 <= entropy <= 0.8, differ, of_right, truncated < 0.3
    return [
        Verdict("accuracy", accuracy, "0.10 to 0.80", 0.1 <= accuracy <= 0.8, accuracy_words),
        Verdict("reward variance", variance, "above 0.05", good[0], variance_words),
        Verdict("entropy (nats)", entropy, "0.20 to 0.80", good[1], entropy_words),
        Verdict("groups with zero variance", zero_variance, "below 0.50", good[2], zero_words[good[2]]),
        Verdict("signal without a right answer", partial, "below 0.50", good[3], partial_words[good[3]]),
        Verdict("truncated", truncated, "below 0.30", good[4], cut_words[good[4]]),
    ]


def _first(warmed: bool) -> str:
    return "train the warm-up longer (SFT_STEPS)" if warmed else "do SFT first"


def conclusion(found: list[Verdict], cuts: str, warmed: bool) -> str:
    """One sentence over all verdicts; ``cuts`` and ``warmed`` as above."""
    accuracy, variance, _, zero, *_, truncated = found
    bad = [verdict.name for verdict in found if not verdict.good]
    if accuracy.value < RARE and truncated.value > MOSTLY:
        return f"most samples are cut off ({cuts}), so few are right; where the limits fit the task, {_first(warmed)}"
    if accuracy.value < RARE:
        return f"{_first(warmed)}: this model is almost never right, RL has nothing to reinforce"
    if accuracy.value > 0.95:
        return "take harder data: this model is almost always right"
    if variance.words == UPSIDE_DOWN:
        return f"mend the reward: {UPSIDE_DOWN}"
    weak = [each.name for each in (accuracy, variance) if not each.good and not (each is variance and zero.good)]
    if not weak:
        return "train: the data has signal for this model" + (f"; watch {', '.join(bad)}" if bad else "")
    return f"weak signal: {', '.join(weak)}"


def probed(
    rollouts: list[Rollout],
    prompts: pd.DataFrame,
    limits: Mapping[str, str] = CUT,
    warmed: bool = False,
    most: float = 1.0,
) -> dict:
    """The content of probe.json except the paths: summary, verdicts, distributions over prompts, prompts. ``limits``:
    the variables that bound a sample (ends.py). ``warmed``: the model is a warm-up. ``most``: of summary.estimate."""
    zero = float((prompts["variance"] == 0).mean())
    means = {name: float(prompts[name].mean()) for name in ("accuracy", "variance", "entropy", "truncated")}
    cuts = advice((rollout.finish_reason for rollout in rollouts), limits)
    found = verdicts(
        **means, zero_variance=zero, partial=partial_credit(prompts), earns=premium(rollouts), cuts=cuts, warmed=warmed
    )
    summarized, of = summary.summarize(rollouts, most=most), summary.conversations_of(rollouts)[prompts.index]
    estimates = {name: summarized["metrics"][name] for name in ("score", "entropy")}
    estimates["accuracy"] = summarized["metrics"]["pass@1"]
    estimates["variance"] = asdict(bootstrap_mean(prompts["variance"].to_numpy(), of.to_numpy()))
    counts, edges = np.histogram(prompts["accuracy"], bins=np.linspace(0, 1, 11))
    return {
        **summarized,
        "conclusion": conclusion(found, cuts, warmed),
        "verdicts": [asdict(verdict) for verdict in found],
        "distributions": {
            name: estimates[name] | {f"p{q}": float(np.percentile(prompts[name], q)) for q in (10, 50, 90)}
            for name in ("accuracy", "score", "variance", "entropy")
        },
        "accuracy_histogram": {"edges": edges.round(1).tolist(), "prompts": counts.tolist()},
        "zero_variance_groups": zero,
        "by_prompt": prompts.reset_index().to_dict("records"),
    }


def write_signal(s: Settings, command: Command, prompts: pd.DataFrame, path: Path) -> None:
    """Write the training prompts whose samples differ in score, which is what GRPO learns from, and have an accuracy
    from FILTER_LOW to FILTER_HIGH, in order, to ``path``. Raises DataError when there are none."""
    fits = prompts["accuracy"].between(command.FILTER_LOW, command.FILTER_HIGH)
    kept = prompts.index[fits & (prompts["variance"] > 0)]
    bounds = f"samples of different scores and an accuracy from {command.FILTER_LOW:g} to {command.FILTER_HIGH:g}"
    if not len(kept):
        raise DataError(f"FILTER=1: no prompt has {bounds}; nothing is written")
    chosen = set(kept)
    wanted = (row for index, row in enumerate(read_rows(s.train_file, max(chosen) + 1)) if index in chosen)
    write_parquet(wanted, path, pq.read_schema(s.train_file))
    show(f"  {len(kept)} of {len(prompts)} prompts have {bounds}; train on them:")
    show(f"  make train TASK={s.TASK} TRAIN_FILE={path}")
    if len(kept) < s.TRAIN_BATCH_SIZE:
        show(f"  (fewer than TRAIN_BATCH_SIZE={s.TRAIN_BATCH_SIZE}: probe more prompts, LIMIT=0 takes all)")


def probe(s: Settings, command: Command, scoring: Scoring, model: str) -> int:
    """Sample ``model`` N times on the first LIMIT training prompts and say whether training can work.

    Writes probe.json and probe.png, then with FILTER=1 signal.parquet. Returns the number of completions on which the
    reward raised. Raises DataError when the filter leaves nothing.
    """
    if command.FILTER_LOW >= command.FILTER_HIGH:
        raise SettingsError(f"FILTER_LOW={command.FILTER_LOW:g}: must be less than FILTER_HIGH={command.FILTER_HIGH:g}")
    if s.EVAL_TEMPERATURE == 0:
        raise SettingsError("EVAL_TEMPERATURE=0: a probe looks at how samples differ; it must be greater than 0")
    if s.N < 2:
        raise SettingsError("N=1: a probe looks at how samples differ; it must be 2 or more")
    job = Job.of(s, model, s.train_file, replace(sampling(s), greedy=False), s.LIMIT)
    root = artifacts() / "probe" / s.TASK
    folder, label = job.folder(root), model_name(model)
    rollouts = sampled({label: job}, root, scoring)[label]
    trained = run_of(model, s.runs_dir)
    warmed = bool(trained) and recorded(trained).get("kind") == "sft"
    result = probed(rollouts, prompts := by_prompt(rollouts), bounds(s), warmed, scoring.most)
    write_json(folder / "probe.json", {"model": model, "data": str(s.train_file), "mark": scoring.mark, **result})
    title = f"{s.TASK}, {label}: {sizes(result)}"
    from verl_tasks.evaluation import plots  # matplotlib, for this alone

    plots.probe_png(prompts, title, folder / "probe.png")
    estimates = result["distributions"] | {n: v for n, v in result["metrics"].items() if n not in ("score", "entropy")}
    rows = []
    for name, values in estimates.items():
        mean = str(Estimate(values["value"], values["low"], values["high"]))
        rows.append([name, mean, *(f"{values[q]:.3f}" if q in values else "" for q in ("p10", "p50", "p90"))])
    show_table(title, ["per prompt", "mean [95 % interval]", "p10", "median", "p90"], rows)
    found = [Verdict(**each) for each in result["verdicts"]]
    cells = [["ok" if v.good else "!", v.name, f"{v.value:.3f}", v.threshold, v.words] for v in found]
    show_table("verdict", ["", "", "value", "good range", "meaning"], cells)
    show(f"=> {result['conclusion']}\n  {folder}/probe.json, probe.png, rollouts.jsonl")
    errors = report_errors(rollouts)
    if command.FILTER:
        write_signal(s, command, prompts, folder / "signal.parquet")
    return errors
