"""Metrics of a model's rollouts, and paired differences of two models: the same for every report."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd

from verl_tasks.ends import CUT, OF_PROGRAMS, TIMEOUT, cut_key, readable
from verl_tasks.evaluation import statistics
from verl_tasks.evaluation.rollouts import GREEDY, SAMPLED, TOO_LONG, Rollout
from verl_tasks.evaluation.statistics import Estimate, bootstrap_mean
from verl_tasks.rows import DataError

# A task's own metrics: a function of its scored completions (dicts, see ``as_dicts``) to named numbers.
OwnMetrics = Callable[[list[dict]], dict[str, float]]

MEANING = {
    "accuracy": "share of prompts whose greedy response is right",
    "pass@k": "chance that one of k samples is right",
    "wrong": "share of samples with a wrong answer",
    "unreadable": "share of samples without an answer that the reward can read, none of them right",
    "lenient": "share of samples that are right for a lenient reader (pass@1 and format_loss)",
    "format_loss": "share of samples that are right for a lenient reader alone",
    "score": "mean reward of the samples",
    "turns": "the model's turns in an episode",
    "tool_errors": "calls in an episode that could not be carried out",
    **{cut_key(end): f"share of episodes that {variable} cut off" for end, variable in CUT.items()},
    "cut_observation": "share of episodes cut off as the environment said more than MAX_RESPONSE_LENGTH at once",
    cut_key(TIMEOUT): "share of episodes that a slow step of the environment ended",
    "failed": "share of episodes whose program or environment ended without a score",
    "sequences": "sequences of tokens in a program's episode: it begins another where it changes its history",
    "model_s": "seconds that the model took in a program's episode",
    "program_s": "seconds that the program took in it",
    "tokens": "length of a sampled response; of an episode, the model's tokens",
    "truncated": "share of samples that hit the length limit; of episodes that were cut off",
    "entropy": "mean token entropy of the samples, nats (lower bound from the 20 likeliest tokens)",
}


OF_ANSWERS = ("wrong", "unreadable", "lenient", "format_loss")  # with pass@1, the first two add up to 1
# Keys of an episode's reward (rewards/episode.py).
OF_EPISODES = ("turns", "tool_errors", "failed", *map(cut_key, CUT), *OF_PROGRAMS)


def as_dicts(rollouts: list[Rollout]) -> list[dict]:
    """What a task's own metrics get: the sampled completions with a reward, each with the fields of ``Rollout``."""
    return [asdict(r) for r in rollouts if r.mode == SAMPLED and r.reward is not None]


def by_prompt(rollouts: list[Rollout]) -> pd.DataFrame:
    """One row per prompt (index: its place), one column per metric. Completions without a reward are left out.

    ``accuracy`` comes from the greedy response, the rest from the samples: pass@k (k: powers of two, and the number of
    samples), the mean of score, other reward keys, tokens, truncated and entropy. NaN: a prompt has no such value.
    Raises DataError when no completion has a reward.
    """
    rows = [
        {
            **{_column(key): value for key, value in r.reward.items()},
            "index": r.index,
            "mode": r.mode,
            "tokens": r.tokens,
            "truncated": float(r.finish_reason in CUT),
            "entropy": np.nan if r.entropy is None else r.entropy,
            **_answer(r),
        }
        for r in rollouts
        if r.reward is not None
    ]
    if not rows:
        why = next((r.error for r in rollouts if r.error), "every prompt is longer than MAX_PROMPT_LENGTH")
        raise DataError(f"none of {len(rollouts)} completions could be scored; the first: {why}")
    frame = pd.DataFrame(rows)
    greedy, samples = frame[frame["mode"] == GREEDY], frame[frame["mode"] == SAMPLED].drop(columns="mode")
    table = pd.DataFrame(index=pd.Index(sorted(frame["index"].unique()), name="index"))
    if len(greedy):
        table["accuracy"] = (greedy.set_index("index")["acc"] > 0).astype(float)
    if len(samples):
        grouped = samples.groupby("index")
        n, right = grouped["acc"].size(), grouped["acc"].agg(lambda acc: int((acc > 0).sum()))
        least = int(n.min())
        for k in sorted({*(2**i for i in range(least.bit_length())), least}):
            table[f"pass@{k}"] = pd.Series(statistics.pass_at_k(n.to_numpy(), right.to_numpy(), k), index=n.index)
        means, last = grouped.mean().drop(columns="acc"), ["tokens", "truncated", "entropy"]
        first = [*OF_ANSWERS, "score"]
        table = table.join(means[[*first, *means.columns.drop([*first, *last]), *last]])
    return table.dropna(axis="columns", how="all")


def _answer(rollout: Rollout) -> dict[str, float]:
    """What ``OF_ANSWERS`` says of one completion with a reward. Without a reward's ``format`` those are unreadable that
    a lenient reader alone finds right. NaN: no lenient reader was asked, and for the first two no ``format``."""
    right, asked = rollout.reward["acc"] > 0, rollout.lenient is not None
    loss, known = bool(rollout.lenient) and not right, asked or "format" in rollout.reward
    unreadable = not right and (loss or not readable(rollout.reward))
    found = {"wrong": not right and not unreadable, "unreadable": unreadable} if known else {}
    found |= {"lenient": right or loss, "format_loss": loss} if asked else {}
    return {name: float(found.get(name, np.nan)) for name in OF_ANSWERS}


def _column(key: str) -> str:
    """The column of a reward's key: its name, unless a metric has that name."""
    taken = key in ("index", "mode", *MEANING) and key not in ("score", *OF_EPISODES)
    return f"reward {key}" if taken or key.startswith("pass@") else key


def conversations_of(rollouts: list[Rollout]) -> pd.Series:
    """A number for each prompt (index: its place), from 0 on: the same for turns of one conversation, which are rows
    with the same ``extra_info.key``. A row without a key is a conversation of its own."""
    numbers = {}
    keys = {r.index: (r.extra_info or {}).get("key") or r.index for r in rollouts}
    return pd.Series({index: numbers.setdefault(key, len(numbers)) for index, key in keys.items()})


def estimate(values: pd.Series, rollouts: list[Rollout], conversations: pd.Series, most: float = 1.0) -> Estimate:
    """Mean over prompts of a column of ``by_prompt``. Wilson where each conversation has one response that is 0 or 1,
    and where all responses of all prompts are the same 0 or 1 (the bootstrap of equal values has no width, and 0 of 128
    is not exactly 0): then of conversations, since the samples of one depend on each other. Else the bootstrap, also
    for a score of 1 that is not right. The interval of a score that is always 0 is of a range up to ``most``."""
    name, values = values.name, values.dropna()
    of, rewards = conversations[values.index], [r.reward for r in rollouts if r.reward is not None]
    key = {_column(key): key for key in set().union(*rewards)}.get(name)  # None: a share by its meaning
    yes_or_no = all(reward.get(key, 0) in (0, 1) for reward in rewards)
    points = name == "score" and any(reward["score"] != reward["acc"] for reward in rewards)  # 1 of 10, say
    counts = points or name in ("tokens", "entropy", "turns", "tool_errors", *OF_PROGRAMS)
    shares = values.isin([0, 1]).all() and not counts
    if shares and ((of.is_unique and _one_response(rollouts, name)) or (yes_or_no and values.nunique() == 1)):
        share = statistics.proportion(int(values.groupby(of).first().sum()), of.nunique())
        return replace(share, high=share.high * most) if name == "score" and not share.value else share
    return bootstrap_mean(values.to_numpy(), of.to_numpy())


def _one_response(rollouts: list[Rollout], name: str) -> bool:
    return name == "accuracy" or all(r.sample == 0 for r in rollouts)


def _own(own_metrics: OwnMetrics | None, rollouts: list[Rollout], prompts: set[int]):
    """The task's own metrics and their resampled values, by name: of conversations; of prompts if there is one."""
    groups: dict[int, list[dict]] = {}
    kept = [row for row in as_dicts(rollouts) if row["index"] in prompts]
    of = conversations_of(rollouts)[[row["index"] for row in kept]]
    for number, row in zip(of.index if of.nunique() == 1 else of, kept, strict=True):  # as bootstrap_mean
        groups.setdefault(number, []).append(row)
    if own_metrics is None or not groups:
        return {}, {}
    try:
        rows = [row for group in groups.values() for row in group]
        values = {name: float(value) for name, value in own_metrics(rows).items()}
        resampled = statistics.bootstrap_statistics(list(groups.values()), own_metrics) if values else {}
        if resampled.keys() != values.keys():
            raise ValueError("its keys differ between prompts")
        if not all(np.isfinite(value).all() for value in [list(values.values()), *resampled.values()]):
            raise ValueError("a value is not a finite number")
        return values, resampled
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(f"the task's own metrics (evaluate.py) raised {why}; the samples are kept") from error


def summarize(rollouts: list[Rollout], own_metrics: OwnMetrics | None = None, most: float = 1.0) -> dict:
    """Metrics of one model: ``{"prompts", "samples", "left_out", "errors", "metrics": {name: Estimate as dict}}``.

    ``conversations``, where there are fewer than prompts: some prompts are turns of one (`extra_info.key`), and the
    intervals are of conversations; of prompts where there is one conversation.
    ``fewest``: scored samples of a prompt, where not all have ``samples``.
    ``left_out``: prompts that were too long to sample. ``errors``: completions on which the reward raised. Neither
    counts in a metric. The task's own metrics come last in ``metrics``. ``most``: see ``estimate``.
    """
    table, of = by_prompt(rollouts), conversations_of(rollouts)
    metrics = {name: estimate(table[name], rollouts, of, most) for name in table}
    own, resampled = _own(own_metrics, rollouts, {*table.index})
    metrics |= {name: _with_interval(value, resampled[name]) for name, value in own.items()}
    conversations = of[table.index].nunique()
    samples = max((r.sample + 1 for r in rollouts if r.mode == SAMPLED), default=0)
    fewest = min(Counter(row["index"] for row in as_dicts(rollouts)).values(), default=samples)
    return {
        "prompts": len(table),
        **({"conversations": conversations} if conversations < len(table) else {}),
        "samples": samples,
        **({"fewest": fewest} if fewest < samples else {}),
        "left_out": len({r.index for r in rollouts if r.finish_reason == TOO_LONG}),
        "errors": sum(bool(r.error) for r in rollouts),
        "metrics": {name: asdict(value) for name, value in metrics.items()},
    }


def _with_interval(value: float, resampled: np.ndarray) -> Estimate:
    """With the percentile interval, widened to ``value``: a resampled maximum is larger, and leaves it out."""
    low, high = map(float, np.percentile(resampled, [2.5, 97.5]))
    return Estimate(value, min(low, value), max(high, value))


@dataclass(frozen=True)
class Difference:
    """Trained minus base, over the prompts that both have, with its p-value and the name of the test."""

    difference: Estimate
    p_value: float
    test: str

    @classmethod
    def read(cls, stored: dict) -> "Difference":
        """From ``asdict``, as the JSON files have it."""
        return cls(Estimate(**stored["difference"]), stored["p_value"], stored["test"])


def _bootstrap_name(conversations: pd.Series) -> str:
    return "paired bootstrap" if conversations.is_unique else "bootstrap of conversations"


def differences(
    base: list[Rollout], trained: list[Rollout], own_metrics: OwnMetrics | None = None
) -> dict[str, Difference]:
    """The paired difference of each metric that both have: exact McNemar where a prompt has one response that is right
    or wrong (accuracy; pass@1 of one sample), else the paired bootstrap over prompts. Where prompts are turns of one
    conversation (`extra_info.key`), the bootstrap of conversations in place of both."""
    left, right, conversations = by_prompt(base), by_prompt(trained), conversations_of(base + trained)
    result = {}
    for name in [name for name in left if name in right]:
        change = (right[name] - left[name]).dropna()
        of, change = conversations[change.index], change.to_numpy()
        if not len(change):
            continue
        (estimate, p_value), test = statistics.bootstrap_difference(change, of.to_numpy()), _bootstrap_name(of)
        if of.is_unique and name in ("accuracy", "pass@1") and _one_response(base + trained, name):
            p_value, test = statistics.mcnemar(int((change > 0).sum()), int((change < 0).sum())), "exact McNemar"
        result[name] = Difference(estimate, p_value, test)
    prompts = set.intersection(*({row["index"] for row in as_dicts(rollouts)} for rollouts in (base, trained)))
    of = conversations[sorted(prompts)]
    (before, resampled_before), (after, resampled) = (_own(own_metrics, each, prompts) for each in (base, trained))
    for name in [name for name in before if name in after]:
        change = resampled[name] - resampled_before[name]  # the same conversations in each resample
        p_value = max(statistics.share_p_value(change), 2.0 ** (1 - of.nunique())) if np.any(change) else 1.0
        result[name] = Difference(_with_interval(after[name] - before[name], change), p_value, _bootstrap_name(of))
    return result
