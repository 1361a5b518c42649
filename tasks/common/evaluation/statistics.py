"""Statistics of scored prompts: means with 95 % intervals, pass@k, paired tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

RESAMPLES = 9999


@dataclass(frozen=True)
class Estimate:
    """A mean in the unit of its values, with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 3 if max(abs(self.low), abs(self.high)) < 10 else 1
        value, low, high = (f"{round(each, digits) + 0.0:.{digits}f}" for each in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]"  # 0.0 is added: -0.0 has a sign

    def signed(self) -> str:
        """The same with a sign, for differences."""
        return f"{'' if str(self).startswith('-') else '+'}{self}"


def proportion(successes: int, total: int) -> Estimate:
    """``successes / total`` with the Wilson score interval (Wilson 1927)."""
    interval = stats.binomtest(successes, total).proportion_ci(0.95, method="wilson")
    return Estimate(successes / total, interval.low, interval.high)


def _sums(values: np.ndarray, conversations: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The sum of ``values`` (shape: prompts) in each conversation, and how many it has, at least 1; shapes
    (conversations,). Sums of several are rounded: differences that cancel each other have no sign."""
    if conversations is None or len(np.unique(conversations)) == len(values):
        return values, np.ones(len(values))
    _, places, counts = np.unique(conversations, return_inverse=True, return_counts=True)
    return np.bincount(places, weights=values).round(12), counts


def _bootstrap(values: np.ndarray, conversations: np.ndarray | None) -> tuple[Estimate, np.ndarray]:
    """See ``bootstrap_mean``; also the resampled means, shape (resamples,)."""
    values = np.asarray(values, dtype=float)
    mean = float(values.mean())
    if len(values) < 2 or np.ptp(values) == 0:
        return Estimate(mean, mean, mean), np.full(RESAMPLES, mean)
    sums, counts = _sums(values, conversations)
    settings = dict(n_resamples=RESAMPLES, batch=500, method="percentile", vectorized=True, rng=0)
    if len(sums) in (1, len(values)):
        found = stats.bootstrap((values,), np.mean, **settings)
    else:
        found = stats.bootstrap((sums, counts), lambda s, n, axis: s.sum(axis) / n.sum(axis), paired=True, **settings)
    return Estimate(mean, *map(float, found.confidence_interval)), found.bootstrap_distribution


def bootstrap_mean(values: np.ndarray, conversations: np.ndarray | None = None) -> Estimate:
    """Mean of ``values`` (shape: prompts) with the percentile bootstrap over prompts (Efron 1979). Not over
    completions: those of a prompt depend on each other.

    ``conversations`` (shape: prompts): equal numbers for turns of one, which depend on each other too. Then whole
    conversations are drawn (Davison and Hinkley 1997, section 3.8): the mean is the sum of their sums by that of their
    numbers of prompts. Over prompts if there is one conversation: its interval says nothing about others.
    """
    return _bootstrap(values, conversations)[0]


def bootstrap_difference(differences: np.ndarray, conversations: np.ndarray | None = None) -> tuple[Estimate, float]:
    """The mean of paired ``differences`` (shape: prompts), see ``bootstrap_mean``, and the two-sided p-value of "it is
    0" from the same resamples.

    Twice the smaller share of resampled means on one side of 0, the observed mean counted as one of them (Davison and
    Hinkley 1997, eq. 4.11), at most 1. Resamples of a few values of one sign never cross 0, so it is at least 2^(1 - d)
    for d differences that are not 0: the smallest p-value of the exact test that flips their signs. With
    ``conversations``, d is the number of those whose sum is not 0: each has one sign.
    """
    estimate, resampled = _bootstrap(differences, conversations)
    smallest = 2.0 ** (1 - np.count_nonzero(_sums(np.asarray(differences, dtype=float), conversations)[0]))
    return estimate, min(1.0, max(smallest, share_p_value(resampled)))


def share_p_value(resampled: np.ndarray) -> float:
    """Two-sided p-value of "it is 0" from the ``resampled`` values of a statistic, shape (resamples,)."""
    side = min(np.count_nonzero(resampled <= 0), np.count_nonzero(resampled >= 0))
    return min(1.0, 2 * (side + 1) / (len(resampled) + 1))


def pooled_mean(values: np.ndarray) -> tuple[Estimate, float]:
    """Mean of ``values``, shape (seeds, prompts), both at least 2, with its 95 % interval and two-sided p-value of 0.

    The prompts are a sample, and so are the seeds. The variance of the mean is that of the seeds' means by the number
    of seeds, plus that of the prompts' means by theirs (Cameron, Gelbach and Miller 2011, without their third term, so
    rather too large). Student's t with Welch's and Satterthwaite's degrees of freedom, because there are few seeds; a
    bootstrap of three seeds has no such correction and is too narrow.
    """
    values = np.asarray(values, dtype=float)
    parts = [means.var(ddof=1) / len(means) for means in (values.mean(1), values.mean(0))]
    mean, variance = float(values.mean()), sum(parts)
    if not variance:
        return Estimate(mean, mean, mean), float(not mean)
    degrees = variance**2 / sum(part**2 / (size - 1) for part, size in zip(parts, values.shape, strict=True))
    half = stats.t.ppf(0.975, degrees) * np.sqrt(variance)
    p_value = 2 * stats.t.sf(abs(mean) / np.sqrt(variance), degrees)
    return Estimate(mean, float(mean - half), float(mean + half)), float(p_value)


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided p-value of the exact McNemar test (McNemar 1947): of ``gained + lost`` prompts whose result differs
    between two models, each is a gain or a loss with probability 1/2. 1.0 if none differs."""
    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def pass_at_k(n: np.ndarray, correct: np.ndarray, k: int) -> np.ndarray:
    """Unbiased pass@k of each prompt, shape (prompts,): the chance that one of k of its ``n`` samples is correct.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, arXiv 2107.03374, eq. 1), computed as their product over
    ``1 - k / i`` for i from n - c + 1 to n. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    n, correct = np.asarray(n), np.asarray(correct)
    if k < 1 or np.any(k > n) or np.any(correct < 0) or np.any(correct > n):
        raise ValueError(f"pass@{k} needs 1 <= k <= n and 0 <= correct <= n")
    return np.array([1 - np.prod(1 - k / np.arange(a - c + 1, a + 1)) for a, c in zip(n, correct, strict=True)])


def bootstrap_statistics(
    groups: Sequence[list], statistic: Callable[[list], dict[str, float]], resamples: int = 200
) -> dict[str, np.ndarray]:
    """``statistic`` of ``resamples`` resamples of ``groups`` (each the rows of a conversation or a prompt), by name;
    shape (resamples,). The same number of groups resamples the same ones."""
    rng = np.random.default_rng(0)
    results = []
    for _ in range(resamples):
        chosen = rng.integers(0, len(groups), len(groups))
        results.append(statistic([row for index in chosen for row in groups[index]]))
    return {name: np.array([result[name] for result in results]) for name in results[0]}
