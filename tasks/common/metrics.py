"""Accuracy, pass@1 and mean score with 95 % intervals, from scored completions."""

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
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def proportion(successes: int, total: int) -> Estimate:
    """``successes / total`` with the Wilson score interval (Wilson 1927)."""
    interval = stats.binomtest(successes, total).proportion_ci(0.95, method="wilson")
    return Estimate(successes / total, interval.low, interval.high)


def bootstrap_mean(values: np.ndarray, seed: int = 0) -> Estimate:
    """Mean of ``values`` (shape: prompts) with the percentile bootstrap over prompts (Efron 1979).

    Prompts are resampled, not completions: the completions of a prompt depend on each other. For a paired comparison
    pass the differences by prompt.
    """
    values = np.asarray(values, dtype=float)
    if len(values) < 2 or np.ptp(values) == 0:
        return Estimate(float(values.mean()), float(values.mean()), float(values.mean()))
    result = stats.bootstrap((values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=seed)
    return Estimate(float(values.mean()), *map(float, result.confidence_interval))


def by_prompt(values: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Mean of ``values`` for each prompt, in the order of the prompt numbers; both arrays have shape (completions,)."""
    order = np.unique(prompts)
    return np.array([np.mean(values[prompts == prompt]) for prompt in order])
