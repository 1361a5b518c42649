"""The validations of a run: verl's metrics of the dev set, the best step, and when to stop.

All follow from the metrics by step (``runs.folder.read_metrics``), so trainer, launcher and reports agree.
"""

import math
import re

# verl's names (verl/trainer/ppo/metric_utils.py, process_validation_metrics): val-core/SOURCE/acc/mean@N, and
# val-aux/SOURCE/reward/mean@N beside it; without `acc` in the reward, val-core/SOURCE/reward/mean@N.
_MEAN = re.compile(r"val-(core|aux)/.+/(acc|reward)/mean@\d+")

Score = tuple[float, float]
LEARNED = 4  # steps


def score(row: dict) -> Score | None:
    """The dev score of a step's metrics: mean accuracy (without one: reward), then mean reward, which breaks ties.

    Means over data sources. None if the step was not validated, or the values are not finite.
    """
    means = [(match, value) for name, value in row.items() if (match := _MEAN.fullmatch(name))]
    core = [value for match, value in means if match[1] == "core"]
    reward = [value for match, value in means if match[2] == "reward"]
    if not core:
        return None
    found = (sum(core) / len(core), sum(reward) / len(reward) if reward else 0.0)
    return found if math.isfinite(sum(found)) else None


def scores(metrics: dict[int, dict]) -> dict[int, Score]:
    """The dev score of each validated step, in order of the steps."""
    found = {step: score(metrics[step]) for step in sorted(metrics)}
    return {step: value for step, value in found.items() if value is not None}


def best(metrics: dict[int, dict]) -> int | None:
    """The step with the highest dev score, the first of equal ones; None without a validation."""
    found = scores(metrics)
    return max(found, key=lambda step: (found[step], -step), default=None)


def ends_early(metrics: dict[int, dict], patience: int, unchanged: int = 0) -> bool:
    """Whether the last ``patience`` validations or more brought no gain (0: never). Those of the first ``unchanged``
    steps are of the same policy and do not count."""
    top = best(metrics)
    return top is not None and 0 < patience <= sum(step > max(top, unchanged) for step in scores(metrics))


def ranked(steps: list[int], metrics: dict[int, dict]) -> list[int]:
    """``steps``, the best first: by dev score, then those that were not validated, the newest first."""
    found = scores(metrics)
    rest = sorted((step for step in steps if step not in found), reverse=True)
    return sorted(found.keys() & set(steps), key=lambda step: (found[step], -step), reverse=True) + rest


def learned(losses: list[float], below: float) -> bool:
    """Whether a warm-up has learned its demonstrations: the mean of the last LEARNED ``losses`` is ``below``."""
    return len(losses) >= LEARNED and sum(losses[-LEARNED:]) / LEARNED < below


def words(metrics: dict[int, dict]) -> str:
    """The last validation and the best one, ``dev 0.414, best 0.430 (step 40)``; empty without one."""
    found = scores(metrics)
    if not found:
        return ""
    last, top = max(found), best(metrics)
    text = f"dev {found[last][0]:.3f}"
    return text if top == last else f"{text}, best {found[top][0]:.3f} (step {top})"
