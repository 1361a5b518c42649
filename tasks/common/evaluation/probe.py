"""`make probe`: does the training data hold signal for this model? Run it before spending GPU hours on training."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from tasks.common.data.rows import DataError, read_rows, write_parquet
from tasks.common.evaluation import plots
from tasks.common.evaluation.rollouts import SAMPLED, Rollout
from tasks.common.evaluation.sample import Job, Scoring, model_name, report_errors, sampled, sampling
from tasks.common.evaluation.statistics import Estimate, bootstrap_mean
from tasks.common.evaluation.summary import nothing_scored, summarize
from tasks.common.evaluation.tables import show_table, sizes
from tasks.common.files import write_json
from tasks.common.settings import Command, Settings, SettingsError, artifacts


@dataclass(frozen=True)
class Verdict:
    """A value, the threshold it is held against, and what follows."""

    name: str
    value: float
    threshold: str
    good: bool
    words: str


def by_prompt(rollouts: list[Rollout]) -> pd.DataFrame:
    """One row a prompt: ``samples``, ``accuracy``, ``score`` and ``variance`` (of the score over the samples,
    population variance), ``entropy`` (nats), ``truncated``. Completions without a reward are left out."""
    frame = pd.DataFrame(
        {
            "index": r.index,
            "accuracy": r.reward["acc"],
            "score": r.reward["score"],
            "entropy": r.entropy,
            "truncated": float(r.finish_reason == "length"),
        }
        for r in rollouts
        if r.mode == SAMPLED and r.reward is not None
    )
    if frame.empty:
        raise nothing_scored(rollouts)
    grouped = frame.groupby("index")
    table = grouped.mean()
    table.insert(0, "samples", grouped.size())
    # By definition, equal scores give exactly 0.
    table["variance"] = grouped["score"].agg(lambda scores: np.var(scores) if np.ptp(scores) else 0.0)
    return table


def distribution(values: pd.Series) -> dict:
    """Mean over prompts with its 95 % interval, and quantiles."""
    quantiles = {f"p{q:02}": float(np.percentile(values, q)) for q in (0, 10, 25, 50, 75, 90, 100)}
    return {**asdict(bootstrap_mean(values.to_numpy())), **quantiles}


def verdicts(accuracy: float, variance: float, entropy: float, zero_variance: float, truncated: float) -> list[Verdict]:
    """The values against the thresholds that practitioners use; all but entropy (nats) and variance are shares."""
    accuracy_words = (
        "too hard for this model: do SFT first, or take easier data or a stronger model",
        "low: few samples are right to learn from; SFT first or easier data would help",
        "good: right and wrong samples to tell apart",
        "high: little is left to learn; harder data, or FILTER=1",
        "too easy for this model: take harder data",
    )[(accuracy >= 0.05) + (accuracy >= 0.1) + (accuracy > 0.8) + (accuracy > 0.95)]
    variance_words = ("low: the samples of a prompt score alike", "good: the samples of a prompt differ in reward")
    entropy_words = (
        "low: it repeats itself, RL finds nothing new",
        "good: it explores",
        "high: it guesses; SFT first sharpens",
    )[(entropy >= 0.2) + (entropy > 0.8)]
    groups = "these groups give GRPO no gradient"
    zero_words = (f"{groups}: FILTER=1 leaves out what is never or always right", groups)
    cut_words = ("cut at MAX_RESPONSE_LENGTH: raise it, or the reward sees no answer", "few responses are cut")
    good = variance > 0.05, 0.2 <= entropy <= 0.8, zero_variance < 0.5, truncated < 0.3
    return [
        Verdict("accuracy", accuracy, "0.10 to 0.80", 0.1 <= accuracy <= 0.8, accuracy_words),
        Verdict("reward variance", variance, "above 0.05", good[0], variance_words[good[0]]),
        Verdict("entropy (nats)", entropy, "0.20 to 0.80", good[1], entropy_words),
        Verdict("groups with zero variance", zero_variance, "below 0.50", good[2], zero_words[good[2]]),
        Verdict("truncated", truncated, "below 0.30", good[3], cut_words[good[3]]),
    ]


VERDICT_HEADER = ["", "", "value", "good", "what it means"]


def verdict_rows(result: dict) -> list[list[str]]:
    """The verdicts of probe.json as rows under VERDICT_HEADER."""
    return [
        ["ok" if v["good"] else "!", v["name"], f"{v['value']:.3f}", v["threshold"], v["words"]]
        for v in result["verdicts"]
    ]


def conclusion(found: list[Verdict]) -> str:
    """One sentence over all verdicts."""
    by_name = {verdict.name: verdict for verdict in found}
    accuracy, variance = by_name["accuracy"], by_name["reward variance"]
    if accuracy.value < 0.05:
        return "do SFT first: this model is almost never right, RL has nothing to reinforce"
    if accuracy.value > 0.95:
        return "take harder data: this model is almost always right"
    if accuracy.good and variance.good:
        bad = [verdict.name for verdict in found if not verdict.good]
        return "train: the data has signal for this model" + (f"; mind {', '.join(bad)}" if bad else "")
    return "weak signal: " + ", ".join(verdict.name for verdict in (accuracy, variance) if not verdict.good)


def summary(rollouts: list[Rollout], prompts: pd.DataFrame) -> dict:
    """What probe.json holds except the paths: overall values, distributions, component rates, verdicts, prompts."""
    shared = summarize(rollouts)
    metrics = shared["metrics"]
    zero = float((prompts["variance"] == 0).mean())
    known = {"score", "tokens", "truncated", "entropy", "accuracy"}
    components = {name: value for name, value in metrics.items() if name not in known and not name.startswith("pass@")}
    found = verdicts(
        float(prompts["accuracy"].mean()),
        float(prompts["variance"].mean()),
        float(prompts["entropy"].mean()),
        zero,
        float(prompts["truncated"].mean()),
    )
    counts, _ = np.histogram(prompts["accuracy"], bins=np.linspace(0, 1, 11))
    return {
        **{name: shared[name] for name in ("prompts", "samples", "left_out", "errors")},
        "conclusion": conclusion(found),
        "verdicts": [asdict(verdict) for verdict in found],
        "distributions": {name: distribution(prompts[name]) for name in ("accuracy", "score", "variance", "entropy")},
        "accuracy_histogram": {"edges": [round(0.1 * i, 1) for i in range(11)], "prompts": counts.tolist()},
        "zero_variance_groups": zero,
        "truncated": float(prompts["truncated"].mean()),
        "tokens": metrics["tokens"],
        "components": components,
        "pass@k": {name: value for name, value in metrics.items() if name.startswith("pass@")},
        "by_prompt": prompts.reset_index().to_dict("records"),
    }


def with_signal(prompts: pd.DataFrame, low: float, high: float) -> list[int]:
    """Places of the prompts whose accuracy is strictly between ``low`` and ``high``."""
    return [int(index) for index, row in prompts.iterrows() if low < row["accuracy"] < high]


def write_signal(rows: Path, kept: list[int], path: Path) -> int:
    """Write the ``kept`` rows of the parquet file ``rows`` to ``path``, in order and in the same schema."""
    chosen = set(kept)
    wanted = (row for index, row in enumerate(read_rows(rows, max(kept) + 1)) if index in chosen)
    return write_parquet(wanted, path, pq.read_schema(rows))


def probe(s: Settings, command: Command, scoring: Scoring, model: str) -> int:
    """Sample ``model`` N times on the first LIMIT training prompts and say whether training can work.

    Writes probe.json and probe.png, and with FILTER=1 signal.parquet. Returns the number of completions on which the
    reward raised. Raises DataError when the filter leaves nothing; everything else is written before.
    """
    if command.FILTER_LOW >= command.FILTER_HIGH:
        raise SettingsError(f"FILTER_LOW={command.FILTER_LOW:g}: must be less than FILTER_HIGH={command.FILTER_HIGH:g}")
    if s.EVAL_TEMPERATURE == 0:
        raise SettingsError("EVAL_TEMPERATURE=0: a probe looks at how samples differ; it must be greater than 0")
    if s.N < 2:
        raise SettingsError("N=1: a probe looks at how samples differ; it must be 2 or more")
    how = replace(sampling(s), greedy=False)
    job = Job(model, str(s.train_file), s.LIMIT, how, gpu_memory_utilization=s.GPU_MEMORY_UTILIZATION)
    root = artifacts() / "probe" / s.TASK
    folder, label = job.folder(root), model_name(model)
    rollouts = sampled({label: job}, root, scoring)[0][label]
    result = summary(rollouts, prompts := by_prompt(rollouts))
    write_json(folder / "probe.json", {"model": model, "data": str(s.train_file), **result})
    title = f"{s.TASK}, {label}: {sizes(result)}"
    plots.probe_png(prompts, title, folder / "probe.png")
    _print(title, result)
    print(f"  {folder}/probe.json, probe.png, rollouts.jsonl")
    errors = report_errors(rollouts)
    signal = folder / "signal.parquet"
    if command.FILTER:
        kept = with_signal(prompts, command.FILTER_LOW, command.FILTER_HIGH)
        bounds = f"accuracy strictly between {command.FILTER_LOW:g} and {command.FILTER_HIGH:g}"
        if not kept:
            raise DataError(f"FILTER=1: no prompt has {bounds}; nothing is written")
        write_signal(s.train_file, kept, signal)
        print(f"  {len(kept)} of {len(prompts)} prompts have {bounds}; train on them:")
        print(f"  make train TASK={s.TASK} TRAIN_FILE={signal}")
        if len(kept) < s.TRAIN_BATCH_SIZE:
            print(f"  (fewer than TRAIN_BATCH_SIZE={s.TRAIN_BATCH_SIZE}: probe more prompts, LIMIT=0 takes all)")
    return errors


def _print(title: str, result: dict) -> None:
    rows = []
    for name, values in result["distributions"].items():
        quantiles = [f"{values[q]:.3f}" for q in ("p10", "p50", "p90")]
        rows.append([name, str(Estimate(values["value"], values["low"], values["high"])), *quantiles])
    for name, value in [*result["pass@k"].items(), *result["components"].items(), ("tokens", result["tokens"])]:
        rows.append([name, str(Estimate(**value)), "", "", ""])
    show_table(title, ["of a prompt", "mean [95 % interval]", "p10", "median", "p90"], rows)
    show_table("verdict", VERDICT_HEADER, verdict_rows(result))
    print(f"=> {result['conclusion']}")
