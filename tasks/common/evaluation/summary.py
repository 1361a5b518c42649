"""Metrics of a model's rollouts, and paired differences of two models: the same for every report."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from tasks.common.data.rows import DataError
from tasks.common.evaluation.rollouts import GREEDY, SAMPLED, TOO_LONG, Rollout
from tasks.common.evaluation.statistics import (
    Estimate,
    bootstrap_mean,
    bootstrap_p_value,
    bootstrap_statistics,
    mcnemar,
    pass_at_k,
    proportion,
    share_p_value,
)

# A task's own metrics: a function of its scored completions (dicts, see ``as_dicts``) to named numbers.
OwnMetrics = Callable[[list[dict]], dict[str, float]]

MEANING = {
    "accuracy": "share of prompts whose greedy response is right",
    "pass@k": "chance that one of k samples is right",
    "score": "mean reward of the samples",
    "tokens": "length of a sampled response",
    "truncated": "share of samples that hit the length limit",
    "entropy": "mean token entropy of the samples, nats (lower bound from the 20 likeliest tokens)",
}


def as_dicts(rollouts: list[Rollout]) -> list[dict]:
    """What a task's own metrics get: the sampled completions with a reward, each with the fields of ``Rollout``."""
    return [asdict(r) for r in rollouts if r.mode == SAMPLED and r.reward is not None]


def ks(n: int) -> list[int]:
    """The k of pass@k to report for n samples: powers of two, and n."""
    return sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})


def by_prompt(rollouts: list[Rollout]) -> pd.DataFrame:
    """One row a prompt (index: its place), one column a metric; what has no reward is left out.

    ``accuracy`` from the greedy response, all else from the samples: pass@k, the mean score, each other key of the
    reward, tokens, truncated, entropy. NaN where a prompt has nothing to take a mean of. Raises DataError when no
    completion has a reward.
    """
    rows = [
        {
            **{_column(key): value for key, value in r.reward.items()},
            "index": r.index,
            "mode": r.mode,
            "tokens": r.tokens,
            "truncated": float(r.finish_reason == "length"),
            "entropy": r.entropy,
        }
        for r in rollouts
        if r.reward is not None
    ]
    if not rows:
        raise nothing_scored(rollouts)
    frame = pd.DataFrame(rows)
    greedy, samples = frame[frame["mode"] == GREEDY], frame[frame["mode"] == SAMPLED].drop(columns="mode")
    table = pd.DataFrame(index=pd.Index(sorted(frame["index"].unique()), name="index"))
    if len(greedy):
        table["accuracy"] = (greedy.set_index("index")["acc"] > 0).astype(float)
    if len(samples):
        grouped = samples.groupby("index")
        n, right = grouped["acc"].size(), grouped["acc"].agg(lambda acc: int((acc > 0).sum()))
        for k in ks(int(n.min())):
            table[f"pass@{k}"] = pd.Series(pass_at_k(n.to_numpy(), right.to_numpy(), k), index=n.index)
        means = grouped.mean()
        last = ["tokens", "truncated", "entropy"]
        components = [name for name in means.columns if name not in ("acc", "score", *last)]
        for name in ["score", *components, *last]:
            table[name] = means[name]
    return table.dropna(axis="columns", how="all")


def _column(key: str) -> str:
    """The column of a reward's key: its name, unless a metric has that name."""
    taken = key in ("index", "mode", *MEANING) and key != "score"
    return f"reward {key}" if taken or key.startswith("pass@") else key


def nothing_scored(rollouts: list[Rollout]) -> DataError:
    """The error for rollouts of which none has a reward."""
    why = next((r.error for r in rollouts if r.error), "every prompt is longer than MAX_PROMPT_LENGTH")
    return DataError(f"none of {len(rollouts)} completions could be scored; the first: {why}")


def estimate(values: pd.Series, one_response: bool, yes_or_no: bool) -> Estimate:
    """Mean over prompts. Wilson where each prompt has one response that is 0 or 1, and where all responses of all
    prompts are the same 0 or 1 (the bootstrap of equal values has no width, and 0 of 128 is not exactly 0): then of
    prompts, since the samples of one depend on each other. Else the bootstrap."""
    values = values.dropna()
    shares = values.isin([0.0, 1.0]).all() and values.name not in ("tokens", "entropy")
    if shares and (one_response or (yes_or_no and values.nunique() == 1)):
        return proportion(int(values.sum()), len(values))
    return bootstrap_mean(values.to_numpy())


def _yes_or_no(rollouts: list[Rollout], name: str) -> bool:
    """Whether ``name`` is 0 or 1 in every completion."""
    if name.startswith("pass@") or name in ("accuracy", "truncated"):
        return True
    return all(r.reward.get(name, 0) in (0.0, 1.0) for r in rollouts if r.reward is not None)


def _one_response(rollouts: list[Rollout], name: str) -> bool:
    return name == "accuracy" or all(r.sample == 0 for r in rollouts)


def _own_groups(rollouts: list[Rollout], prompts: list[int]) -> list[list[dict]]:
    groups: dict[int, list[dict]] = {index: [] for index in prompts}
    for row in as_dicts(rollouts):
        if row["index"] in groups:
            groups[row["index"]].append(row)
    return [group for group in groups.values() if group]


def _own(own_metrics: OwnMetrics | None, rollouts: list[Rollout], prompts: list[int]):
    """The task's own metrics and their resampled values, by name."""
    groups = _own_groups(rollouts, prompts)
    rows = [row for group in groups for row in group]
    if own_metrics is None or not rows:
        return {}, {}
    try:
        values = {name: float(value) for name, value in own_metrics(rows).items()}
        resampled = bootstrap_statistics(groups, own_metrics) if values else {}
        if resampled.keys() != values.keys():
            raise ValueError("its keys differ between prompts")
        if not all(np.isfinite(value).all() for value in [list(values.values()), *resampled.values()]):
            raise ValueError("a value is not a finite number")
        return values, resampled
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(f"the task's own metrics (evaluate.py) raised {why}; what was sampled is kept") from error


def summarize(rollouts: list[Rollout], own_metrics: OwnMetrics | None = None) -> dict:
    """Metrics of one model: ``{"prompts", "samples", "left_out", "errors", "metrics": {name: Estimate as dict}}``.

    ``left_out``: prompts that were too long to sample. ``errors``: completions on which the reward raised; neither
    counts in a metric. The task's own metrics come last in ``metrics``.
    """
    table = by_prompt(rollouts)
    metrics = {name: estimate(table[name], _one_response(rollouts, name), _yes_or_no(rollouts, name)) for name in table}
    own, resampled = _own(own_metrics, rollouts, list(table.index))
    for name, value in own.items():
        metrics[name] = Estimate(value, *_interval(resampled[name]))
    return {
        "prompts": len(table),
        "samples": max((r.sample + 1 for r in rollouts if r.mode == SAMPLED), default=0),
        "left_out": len({r.index for r in rollouts if r.finish_reason == TOO_LONG}),
        "errors": sum(bool(r.error) for r in rollouts),
        "metrics": {name: asdict(value) for name, value in metrics.items()},
    }


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """Trained minus base, over the prompts that both have: estimate, p-value, and the test."""

    estimate: Estimate
    p_value: float
    test: str


def differences(
    base: list[Rollout], trained: list[Rollout], own_metrics: OwnMetrics | None = None
) -> dict[str, Difference]:
    """The paired difference of each metric that both have.

    Exact McNemar where a prompt has one response that is right or wrong (accuracy; pass@1 of one sample), the paired
    bootstrap over prompts for the rest.
    """
    left, right = by_prompt(base), by_prompt(trained)
    prompts = left.index.intersection(right.index)
    result = {}
    for name in [name for name in left if name in right]:
        pair = pd.DataFrame({"base": left.loc[prompts, name], "trained": right.loc[prompts, name]}).dropna()
        if not len(pair):
            continue
        change = (pair["trained"] - pair["base"]).to_numpy()
        if name in ("accuracy", "pass@1") and _one_response(base + trained, name):
            p_value, test = mcnemar(int((change > 0).sum()), int((change < 0).sum())), "exact McNemar"
        else:
            p_value, test = bootstrap_p_value(change), "paired bootstrap"
        result[name] = Difference(bootstrap_mean(change), p_value, test)
    sampled = [{row["index"] for row in as_dicts(rollouts)} for rollouts in (base, trained)]
    prompts = sorted(sampled[0] & sampled[1])
    own = [_own(own_metrics, rollouts, prompts) for rollouts in (base, trained)]
    for name in [name for name in own[0][0] if name in own[1][0]]:
        change = own[1][1][name] - own[0][1][name]  # the same prompts in each resample
        p_value = max(share_p_value(change), 2.0 ** (1 - len(prompts))) if np.any(change) else 1.0
        value = Estimate(own[1][0][name] - own[0][0][name], *_interval(change))
        result[name] = Difference(value, p_value, "paired bootstrap")
    return result


def changes_as_dicts(changes: dict[str, Difference]) -> dict[str, dict]:
    """As the reports' JSON files hold them: ``difference``, ``p_value`` and ``test`` of each metric."""
    return {
        name: {"difference": asdict(change.estimate), "p_value": change.p_value, "test": change.test}
        for name, change in changes.items()
    }


def changes_from(found: dict[str, dict]) -> dict[str, Difference]:
    """What ``changes_as_dicts`` wrote."""
    return {
        name: Difference(Estimate(**each["difference"]), each["p_value"], each["test"]) for name, each in found.items()
    }


def right_by_prompt(rollouts: list[Rollout]) -> dict[int, bool]:
    """Whether the one response that stands for a prompt is right: the greedy one, without it the first sample."""
    modes = {r.mode for r in rollouts}
    mode = GREEDY if GREEDY in modes else SAMPLED
    return {r.index: r.reward["acc"] > 0 for r in rollouts if r.mode == mode and r.sample == 0 and r.reward}
