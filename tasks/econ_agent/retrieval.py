"""Few-shot examples: similar states in which a worker decided well, found with scipy's k-d tree."""

from dataclasses import dataclass

import numpy as np
from scipy.spatial import KDTree

from tasks.econ_agent.reward import decision_score
from tasks.econ_agent.simulation import State, behave, rolled_out

QUANTILE = 0.75  # a decision is good if its score is at least this quantile, of states of the same employment status
SIMULATIONS = 64
MONTHS = 24
STREAM = 0  # of the seed: no simulation of the memory gives a prompt, nor is run in evaluation


@dataclass(frozen=True)
class Shot:
    """A state with the decision that a worker made in it, both in [0, 1], and its score (see reward.py)."""

    state: State
    work: float
    consumption: float
    score: float


def features(state: State) -> np.ndarray:
    """What makes states similar, (5,): income, savings and price as logarithms, interest, unemployment."""
    money = np.log1p([state.income, state.savings, state.price])
    return np.array([*money, state.interest, state.unemployment])


def roll_out(seed: int) -> list[Shot]:
    """The decisions of all workers of SIMULATIONS economies, each in one of its first MONTHS months."""
    shots = []
    for number in range(SIMULATIONS):
        economy, rng = rolled_out((seed, STREAM, number), MONTHS)
        decisions = [np.round(decision, 2) for decision in behave(economy, rng)]
        scores = decision_score(*decisions, *economy.targets())
        columns = (values.tolist() for values in (*decisions, scores))
        shots += [Shot(*values) for values in zip(economy.states(), *columns, strict=True)]
    return shots


class Memory:
    """The good ``shots``: of each employment status those with a score of at least its QUANTILE."""

    def __init__(self, shots: list[Shot]):
        self.good: dict[bool, list[Shot]] = {}
        self.trees: dict[bool, KDTree] = {}
        points = np.array([features(shot.state) for shot in shots])
        self.scale = np.maximum(points.std(0), 1e-9)
        for employed in {shot.state.employed for shot in shots}:
            same = [shot for shot in shots if shot.state.employed == employed]
            least = np.quantile([shot.score for shot in same], QUANTILE)
            self.good[employed] = [shot for shot in same if shot.score >= least]
            self.trees[employed] = KDTree([features(shot.state) / self.scale for shot in self.good[employed]])

    def similar(self, state: State, k: int) -> list[Shot]:
        """The ``k`` good shots (fewer if there are fewer) of the same employment status nearest to ``state``, nearest
        first; never ``state`` itself."""
        tree = self.trees.get(state.employed)
        if tree is None or k < 1:
            return []
        count = min(k + 1, tree.n)
        _, found = tree.query(features(state) / self.scale, count)
        shots = [self.good[state.employed][i] for i in np.atleast_1d(found)]
        return [shot for shot in shots if shot.state != state][:k]
