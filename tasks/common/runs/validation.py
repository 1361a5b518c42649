"""The validations of a run: verl's metrics of the dev set, the best step, and when to stop.

All follow from the dev scores by step, in order, so trainer, launcher and reports agree.
"""

import math
import re
from statistics import median

# verl's names (verl/trainer/ppo/metric_utils.py, process_validation_metrics): val-core/SOURCE/acc/mean@N, and
# val-aux/SOURCE/reward/mean@N beside it; without `acc` in the reward, val-core/SOURCE/reward/mean@N.
_MEAN = re.compile(r"val-(core|aux)/.+/(acc|reward)/mean@\d+")

Score = tuple[float, float]
LEARNED = 4  # steps
WHOLE = "train/demonstration_loss"  # nats of a whole demonstration; "train/loss" is a token's


def score(row: dict) -> Score | None:
    """The dev score of a step's metrics: mean accuracy (without one: reward), then mean reward, which breaks ties.

    Means over data sources. None if the step was not validated, or the values are not finite.
    """
    means = [(match, value) for name, value in row.items() if (match := _MEAN.fullmatch(name))]
    core = [value for match, value in means if match[1] == "core"]
    reward = [value for match, value in means if match[2] == "reward"]
    if not core:
        return None
    both = (sum(core) / len(core), sum(reward) / len(reward) if reward else 0.0)
    return both if math.isfinite(sum(both)) else None


def forget(by_step: dict, step: int) -> None:
    """Remove ``step`` and all after it, which are trained again, from ``by_step``, in order of the steps."""
    while by_step and next(reversed(by_step)) >= step:
        by_step.popitem()


def add(by_step: dict[int, Score], step: int, row: dict) -> None:
    """Bring the dev scores up to date with the metrics ``row`` of ``step``, the last one so far."""
    forget(by_step, step)
    if (value := score(row)) is not None:
        by_step[step] = value


def scores(metrics: dict[int, dict]) -> dict[int, Score]:
    """The dev score of each validated step of ``metrics``, which are in order of the steps."""
    by_step: dict[int, Score] = {}
    for step, row in metrics.items():
        add(by_step, step, row)
    return by_step


def best(by_step: dict[int, Score]) -> int | None:
    """The step with the highest dev score, the first of equal ones; None without a validation."""
    return max(by_step, key=lambda step: (by_step[step], -step), default=None)


def ends_early(by_step: dict[int, Score], patience: int, unchanged: int = 0) -> bool:
    """Whether the last ``patience`` validations or more brought no gain (0: never). Those of the first ``unchanged``
    steps are of the same policy and do not count."""
    top = best(by_step)
    return top is not None and 0 < patience <= sum(step > max(top, unchanged) for step in by_step)


def ranked(steps: list[int], by_step: dict[int, Score]) -> list[int]:
    """``steps``, the best first: by dev score, then those that were not validated, the newest first."""
    rest = sorted((step for step in steps if step not in by_step), reverse=True)
    return sorted(by_step.keys() & set(steps), key=lambda step: (by_step[step], -step), reverse=True) + rest


def learned(losses: list[float], below: float) -> bool:
    """Whether a warm-up has learned its demonstrations: the median of the last LEARNED ``losses`` is ``below``: small
    batches have one step of a large loss now and then."""
    return len(losses) >= LEARNED and median(losses[-LEARNED:]) < below


def words(by_step: dict[int, Score]) -> str:
    """The last validation and the best one, ``dev 0.414, best 0.430 (step 40)``; empty without one."""
    if not by_step:
        return ""
    last, top = max(by_step), best(by_step)
    text = f"dev {by_step[last][0]:.3f}"
    return text if top == last else f"{text}, best {by_step[top][0]:.3f} (step {top})"
