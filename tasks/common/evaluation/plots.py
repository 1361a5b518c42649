"""The pictures of the reports: PNG and SVG, the same bytes for the same numbers."""

import io
import math
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

from verl_tasks.files import written_beside

matplotlib.use("Agg")  # no screen
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

COLORS = ("#4c72b0", "#dd8452", "#55a868")
DRAWN = 1e100  # matplotlib cannot place what is near the largest float
DOTS = 1000  # in a line; of more the picture would be larger, and they would cover each other
LINES_STYLE = {"svg.hashsalt": "run", "text.parse_math": False}  # no random ids; a name may have dollars
LINES_STYLE |= {"axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}
LINES_STYLE |= {"axes.titlelocation": "left", "axes.titlesize": 10, "axes.formatter.limits": (-3, 5)}
LINES_STYLE |= {"legend.frameon": False}


def save(figure, path: Path) -> None:
    """Write ``figure`` without version and date, which would make each file different."""
    with written_beside(path) as partial:
        figure.savefig(partial, format="png", dpi=120, metadata={"Software": None})
    plt.close(figure)


def probe_png(prompts: pd.DataFrame, title: str, path: Path) -> None:
    """Accuracy histogram, variance against accuracy, entropy histogram; ``prompts``: one row per prompt."""
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


def compare_png(summaries: dict[str, dict], score_change: pd.Series, title: str, path: Path) -> None:
    """The models' metrics except tokens and entropy, with intervals; histogram of the score's change by prompt."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained", width_ratios=(2, 1))
    metrics = [pd.DataFrame(summary["metrics"]).T for summary in summaries.values()]
    names = [name for name in metrics[0].index if all(name in each.index for each in metrics)]
    names = [name for name in names if name not in ("tokens", "entropy")]
    values, low, high = (
        np.array([each.loc[names, end] for each in metrics], dtype=float) for end in ("value", "low", "high")
    )
    errors = np.stack([values - low, high - values], axis=1).clip(min=0)  # (models, 2, metrics), as pandas wants them
    bars = pd.DataFrame(values.T, names, list(summaries))
    if names:
        bars.plot.bar(ax=left, yerr=errors, capsize=2, width=0.8, rot=30, color=list(COLORS), title="95 % intervals")
    right.hist(score_change, bins=21, color=COLORS[1])
    right.axvline(0, color="grey", linewidth=1)
    right.set(xlabel="change of a prompt's mean score", ylabel="prompts", title="Prompt by prompt")
    figure.suptitle(title, x=0.01, ha="left")
    save(figure, path)


def lines_svg(lines: dict[str, dict[int, float]], title: str, wide: bool = False) -> bytes:
    """Metrics over the steps, as SVG without references; ``lines``: value by step, by metric. A value that is not
    finite leaves a gap. Several lines have a legend below."""
    with plt.rc_context(LINES_STYLE):
        width, many = 10.6 if wide else 5.2, len(lines) > 1
        figure, axes = plt.subplots(figsize=(width, 3.3 if many else 2.9))
        # The same margins, so that pictures below each other are aligned.
        figure.subplots_adjust(left=0.65 / width, right=0.99, top=0.9, bottom=0.3 if many else 0.18)
        colors = plt.get_cmap("tab10").colors if many else COLORS
        for (name, values), color in zip(lines.items(), colors, strict=False):
            drawn = [value if math.isfinite(value) and abs(value) < DRAWN else math.nan for value in values.values()]
            dots = {"marker": ".", "markersize": 4} if len(drawn) <= DOTS else {}
            axes.plot(list(values), drawn, linewidth=1.3, color=color, label=name, **dots)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="step", title=title)
        if many:
            figure.legend(loc="lower center", ncols=4 if wide else 2, fontsize=7)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
        plt.close(figure)
    return picture.getvalue()
