"""`make attack` on the reward functions that verl and TRL ship: a Markdown table of what fools them.

    PYTHONPATH=. python tests/benchmarks/attack_libraries.py [SECONDS]     # for each, default 20

The rows ask for a number; their demonstrations are in the form that the reward reads.
"""

import json
import random
import sys
from collections.abc import Callable

from trl import rewards as trl_rewards
from verl.utils.reward_score import gsm8k, math_dapo, math_reward, search_r1_like_qa_em

from tasks.common.evaluation import attack
from tasks.common.evaluation.exploits import Row
from tasks.common.guarded import Guarded
from tasks.common.rewards.answers import read_ground_truth
from tasks.common.text import one_line

ROWS, SHOWN = 40, 3


def of_trl(reward: Callable) -> Callable:
    """A reward of TRL, of a batch of chats, as one of ours."""

    def score(response: str, truth: str) -> float:
        return reward([[{"role": "assistant", "content": response}]], solution=[f"${truth}$"])[0] or 0.0

    return score


def of_qa(response: str, truth: str) -> float:
    return search_r1_like_qa_em.compute_score(response, {"target": [truth]})


# The reward, of a response and a truth, and the form of its answers.
REWARDS = {
    "verl gsm8k": (gsm8k.compute_score, "It is {0}.\n#### {0}"),
    "verl gsm8k, flexible": (lambda response, truth: gsm8k.compute_score(response, truth, "flexible"), "It is {0}"),
    "verl math_reward": (math_reward.compute_score, "It is \\boxed{{{0}}}."),
    "verl math_dapo": (
        lambda response, truth: math_dapo.compute_score(response, truth)["acc"],
        "It is clear.\nAnswer: {0}",
    ),
    "verl search_r1_like_qa_em": (of_qa, "<answer>{0}</answer>"),
    "trl accuracy_reward": (of_trl(trl_rewards.accuracy_reward), "It is $\\boxed{{{0}}}$."),
    "trl reasoning_accuracy_reward": (
        of_trl(trl_rewards.reasoning_accuracy_reward),
        "x</think>It is $\\boxed{{{0}}}$.",
    ),
    "trl think_format_reward": (of_trl(trl_rewards.think_format_reward), "<think>Count.</think>It is {0}."),
}


def rows(form: str) -> list[Row]:
    rng = random.Random(42)
    numbers = [rng.randint(-5, 9999) for _ in range(ROWS)]
    return [Row(f"What is {n - 7} + 7?", json.dumps(str(n)), form.format(n)) for n in numbers]


def found(name: str, seconds: float) -> list[str]:
    """A row of the table."""
    score, form = REWARDS[name]

    def compute_score(source, response, truth, extra=None):
        result = float(score(response, read_ground_truth(truth)))
        return {"score": result, "acc": float(result >= 1)}

    reward = Guarded(compute_score, problems := rows(form))
    try:
        search = attack.Search(problems, reward, seconds)
        attack.run(search, seed=42)
    finally:
        reward.close()
    best = sorted(search.found.values(), key=lambda each: (-len(each.fooled), len(each.response)))
    texts = {each.response: each for each in reversed(best)}  # the same text once
    shown = [
        f"{one_line(repr(each.response), 60)} ({len(each.fooled)} of {ROWS}: {one_line(each.why, 60)})"
        for each in sorted(texts.values(), key=lambda each: (-len(each.fooled), len(each.response)))[:SHOWN]
    ]
    return [name, f"{len(search.against)} of {ROWS}", str(search.tried), "; ".join(shown) or "nothing"]


if __name__ == "__main__":
    print("| reward | demonstrations right | answers tried | found |\n|---|---:|---:|---|")
    for name in REWARDS:
        print(f"| {' | '.join(found(name, float(sys.argv[1]) if sys.argv[1:] else 20))} |", flush=True)
