"""What ASYNC does to learning: `python -m tests.benchmarks.async_learning off,colocate [ARGS]`.

An experiment (launch/experiments.py) whose arms are forms of ASYNC: the same data, samples a step and SEEDS, JOBS at a
time; then the differences of all metrics to the first form, paired by seed and prompt. Settings: from the environment.
"""

import os
import sys
from unittest import mock

from verl_tasks.launch import experiments
from verl_tasks.launch.main import main
from verl_tasks.settings import Command, Settings, load_settings


def planned(forms: list[str]):
    """In place of experiments.planned: the settings of each training, by its label FORM@RATE#SEED.

    Each seed begins with the next form, so that two GPUs share both forms.
    """

    def runs(s: Settings, command: Command) -> dict[str, Settings]:
        return {
            f"{form}@{s.LR:g}#{seed}": load_settings(os.environ | {"ASYNC": form, "TRAIN_SEED": str(seed)})
            for seed in range(s.TRAIN_SEED, s.TRAIN_SEED + command.SEEDS)
            for form in forms[seed % len(forms) :] + forms[: seed % len(forms)]
        }

    return runs


if __name__ == "__main__":
    with mock.patch.object(experiments, "planned", planned(sys.argv[1].split(","))):
        main("experiment", sys.argv[2:])
