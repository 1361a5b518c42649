"""A training by step: mean score and entropy of a metrics file, as the picture that the README shows.

    PYTHONPATH=. python tests/benchmarks/curve.py [FILE.metrics.jsonl] [PICTURE.png]

FILE has a line for each step, as verl writes them.
"""

import json
import sys
from pathlib import Path

from tasks.common.evaluation.plots import COLORS, plt, save
from tests.helpers import ROOT

METRICS = ROOT / "docs/results/h200-countdown-search-24.metrics.jsonl"
PICTURE = ROOT / "docs/images/countdown-search.png"
SCORE, ENTROPY = "critic/score/mean", "actor/entropy"


def curve(metrics: Path) -> dict[str, list[float]]:
    """``step``, and by step the mean score of the rollouts and the entropy (nats a token) of the policy."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {"step": [row["step"] for row in rows]} | {
        name: [row["data"][name] for row in rows] for name in (SCORE, ENTROPY)
    }


def draw(metrics: Path, picture: Path) -> None:
    """Score on the left axis, entropy on the right one; both from 0."""
    values = curve(metrics)
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
    given = [Path(argument) for argument in sys.argv[1:]]
    draw(*(given + [METRICS, PICTURE][len(given) :]))
