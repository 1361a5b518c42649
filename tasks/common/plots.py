"""The pictures of the reports: PNG, the same bytes for the same numbers."""

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

from tasks.common.data import written_beside

matplotlib.use("Agg")  # no screen
from matplotlib import pyplot as plt

COLORS = ("#4c72b0", "#dd8452")


def save(figure, path: Path) -> None:
    """Write ``figure`` without the version and the date that would make each file different."""
    with written_beside(path) as partial:
        figure.savefig(partial, format="png", dpi=120, metadata={"Software": None})
    plt.close(figure)


def probe_png(prompts: pd.DataFrame, title: str, path: Path) -> None:
    """Accuracy histogram, variance against accuracy, entropy histogram; ``prompts``: one row a prompt."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    left.hist(prompts["accuracy"], bins=np.linspace(0, 1, 21), color=COLORS[0])
    left.set(xlabel="accuracy over the samples", ylabel="prompts", title="Accuracy", xlim=(0, 1))
    sizes = prompts.groupby(["accuracy", "variance"]).size().reset_index(name="count")
    middle.scatter(sizes["accuracy"], sizes["variance"], s=12 + 4 * sizes["count"], alpha=0.5, color=COLORS[0])
    middle.axhline(0.05, color="grey", linestyle="--", linewidth=1)
    middle.set(xlabel="accuracy", ylabel="reward variance", title="Signal (area: prompts)", xlim=(-0.05, 1.05))
    right.hist(prompts["entropy"], bins=20, color=COLORS[0])
    right.axvspan(0.2, 0.8, color="green", alpha=0.12)
    right.set(xlabel="mean token entropy (nats)", ylabel="prompts", title="Entropy (0.2 to 0.8 shaded)")
    figure.suptitle(title, x=0.01, ha="left")
    save(figure, path)


def compare_png(summaries: dict[str, dict], score_change: np.ndarray, title: str, path: Path) -> None:
    """Two models' metrics but tokens and entropy, with their intervals; histogram of the score's change by prompt."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained", width_ratios=(2, 1))
    shared = set.intersection(*(set(summary["metrics"]) for summary in summaries.values()))
    first = next(iter(summaries.values()))["metrics"]
    names = [name for name in first if name in shared and name not in ("tokens", "entropy")]
    for place, ((label, summary), color) in enumerate(zip(summaries.items(), COLORS, strict=False)):
        values = [summary["metrics"][name] for name in names]
        height = [value["value"] for value in values]
        error = [
            [max(0, v["value"] - v["low"]) for v in values],
            [max(0, v["high"] - v["value"]) for v in values],
        ]
        left.bar(np.arange(len(names)) + 0.4 * place, height, 0.38, yerr=error, capsize=2, label=label, color=color)
    left.set_xticks(np.arange(len(names)) + 0.2, names, rotation=30, ha="right")
    left.set(title="95 % intervals")
    left.legend()
    right.hist(score_change, bins=21, color=COLORS[1])
    right.axvline(0, color="grey", linewidth=1)
    right.set(xlabel="change of a prompt's mean score", ylabel="prompts", title="Prompt by prompt")
    figure.suptitle(title, x=0.01, ha="left")
    save(figure, path)
