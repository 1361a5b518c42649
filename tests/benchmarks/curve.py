"""A training by step, as the picture that the README shows: PYTHONPATH=. python tests/benchmarks/curve.py"""

from pathlib import Path

from tasks.common.evaluation.plots import COLORS, plt, save
from tests.helpers import ROOT
from tests.results import metrics

RUN = "h200-countdown-search-24"
PICTURE = ROOT / "docs/images/countdown-search.png"
SCORE, ENTROPY = "critic/score/mean", "actor/entropy"


def curve() -> dict[str, list[float]]:
    """``step``, and by step the mean score of the rollouts and the entropy (nats a token) of the policy."""
    steps = metrics()[RUN]
    return {"step": [*steps]} | {name: [data[name] for data in steps.values()] for name in (SCORE, ENTROPY)}


def draw(picture: Path) -> None:
    """Score on the left axis, entropy on the right one; both from 0."""
    values = curve()
    figure, left = plt.subplots(figsize=(7, 2.8), layout="constrained")
    right = left.twinx()
    for axis, name, label, top, color in (
        (left, SCORE, "mean score of the rollouts", 1, COLORS[0]),
        (right, ENTROPY, "entropy (nats)", None, COLORS[1]),
    ):
        axis.plot(values["step"], values[name], color=color, marker=".", markersize=4)
        axis.set_ylim(0, top)
        axis.set_ylabel(label, color=color)
    left.set_xlabel("step")
    left.locator_params(axis="x", integer=True)
    save(figure, picture)


if __name__ == "__main__":
    draw(PICTURE)
