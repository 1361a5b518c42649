"""What a training itself has brought, in words: the paired difference to what it began with, and what to try next."""

from pathlib import Path

from tasks.common.evaluation.statistics import Estimate
from tasks.common.evaluation.summary import Difference
from tasks.common.evaluation.tables import p_text
from tasks.common.files import read_json
from tasks.common.settings import Settings, artifacts


def headline(names) -> str | None:
    """The metric that stands for all ``names``: pass@1 is what RL trains, and less noisy than one greedy response."""
    return next((name for name in ("pass@1", "accuracy") if name in names), next(iter(names), None))


def signed(estimate: Estimate) -> str:
    """The estimate with its sign and interval."""
    return f"{'' if estimate.value < 0 else '+'}{estimate}"


def gain(pair: str, name: str, change: Difference) -> str:
    """The difference in one line, with its interval and what that says; ``pair``: "grpo - sft"."""
    low, high = change.estimate.low, change.estimate.high
    said = "a loss" if high < 0 else "a gain" if low > 0 else "the interval includes 0, so this may be chance"
    return f"{pair}: {name} {signed(change.estimate)}, p {p_text(change.p_value)} ({change.test}): {said}"


def next_steps(s: Settings, start: str, change: Difference) -> list[str]:
    """What to try where a training from the model ``start`` with ``s`` brought no clear gain; else nothing."""
    if change.estimate.low > 0:
        return []
    if change.estimate.high < 0:
        return [
            f"a lower rate: LR={s.LR / 2:g}, or KL_COEF={s.KL_COEF or 0.01:g}",
            "an earlier checkpoint: validate (TEST_FREQ), keep more (KEEP) and take STEP=best",
        ]
    return [
        f"more steps: the same command with STEPS={2 * s.STEPS}",
        f"the probe of what it began with: {_probe(s, start)}",
        f"another rate: LR={2 * s.LR:g}, and lower if the reward falls",
        "more test prompts: a larger TEST_SIZE narrows the interval",
    ]


def _probe(s: Settings, start: str) -> str:
    """The newest probe's conclusion about the model ``start``, or the command that makes one."""
    found = [
        file for file in (artifacts() / "probe" / s.TASK).glob("*/probe.json") if read_json(file).get("model") == start
    ]
    if found:
        return read_json(max(found, key=_written))["conclusion"]
    return f"make probe TASK={s.TASK} says whether the data has signal for it"


def _written(file: Path) -> float:
    return file.stat().st_mtime
