"""The pictures of the README and the tutorials: PYTHONPATH=. python tests/benchmarks/pictures.py

`gsm8k.png` (README.md) and `before-after.png` (QUICKSTART.md) are drawn from docs/results;
`constant-answers.png` (ADDING_A_TASK.md) from the task that the page writes: its blocks are run as they stand there.
"""

import re
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace

from tests import results
from tests.helpers import ROOT
from verl_tasks.evaluation.plots import COLORS, plt, save

IMAGES = ROOT / "docs/images"
README = "h200-gsm8k-1.5b"  # its training
SCORE, ENTROPY = "critic/score/mean", "actor/entropy"
METRICS = ["pass@1", "pass@2", "accuracy", "score", "numbers", "one_operator"]


def curve() -> dict[str, list[float]]:
    """``step``, and by step the mean score of the rollouts and the entropy (nats a token) of the policy."""
    steps = results.metrics()[README]
    return {"step": [*steps]} | {name: [data[name] for data in steps.values()] for name in (SCORE, ENTROPY)}


def gsm8k(picture: Path) -> None:
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


def before_after(picture: Path) -> None:
    """Each metric of the warm-up and of the trained model, with its 95 % interval."""
    found = results.recipes()["cpu-countdown"]["compare"]
    figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
    for shift, model, label, color in ((-0.12, "warm-up", "warm-up", COLORS[0]), (0.12, "trained", "GRPO", COLORS[1])):
        values = [found[model]["metrics"][name] for name in METRICS]
        middle = [each["value"] for each in values]
        errors = [[each["value"] - each["low"] for each in values], [each["high"] - each["value"] for each in values]]
        places = [place + shift for place in range(len(METRICS))]
        axis.errorbar(places, middle, yerr=errors, fmt="o", markersize=4, capsize=3, color=color, label=label)
    axis.set_xticks(range(len(METRICS)), METRICS)
    axis.set_ylim(0, 1)
    axis.legend(frameon=False, loc="upper left", ncols=2)
    save(figure, picture)


def block(file: str) -> ModuleType:
    """The module that ADDING_A_TASK.md shows as the content of ``file``."""
    text = (ROOT / "docs/ADDING_A_TASK.md").read_text()
    source = re.search(rf"<!-- test: file {re.escape(file)} -->\n```python\n(.*?)^```$", text, re.M | re.S)[1]
    module = ModuleType(Path(file).stem)
    exec(compile(source, file, "exec"), module.__dict__)
    return module


def constant_answers(picture: Path) -> None:
    """The mean score of a policy that writes the same number to 1,000 prompts, by that number and DIFFICULTY."""
    problems, reward = block("tasks/vowels/prepare_data.py"), block("tasks/vowels/reward.py")
    figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
    for difficulty, color in zip(problems.LENGTHS, COLORS, strict=False):
        settings = SimpleNamespace(SEED=0, DIFFICULTY=difficulty)
        truths = [each.ground_truth for each in islice(problems.generate(settings), 1000)]
        numbers = range(17)
        means = [
            sum(reward.compute_score("", f"<answer>{number}</answer>", truth)["score"] for truth in truths) / 1000
            for number in numbers
        ]
        axis.plot(numbers, means, marker=".", color=color, label=f"DIFFICULTY={difficulty}")
    axis.set(xlabel="the one answer", ylabel="mean score", ylim=(0, 1))
    axis.legend(frameon=False)
    save(figure, picture)


PICTURES = {"gsm8k.png": gsm8k, "before-after.png": before_after, "constant-answers.png": constant_answers}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw(IMAGES / name)
