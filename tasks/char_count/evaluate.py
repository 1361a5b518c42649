"""Evaluation of the task: the shared one (tasks/common/evaluation/main.py) and the task's own metrics."""

import functools
from collections import Counter

from tasks.char_count.reward import compute_score
from verl_tasks import evaluate, math_answer


@functools.cache  # the bootstrap asks for the same completions again and again
def _answer(response: str) -> str:
    found = math_answer.find_answer(response)
    return found.text if found else ""


def metrics(scored: list[dict]) -> dict[str, float]:
    """The task's own metrics, from the sampled completions; every key of the reward is reported without them.

    ``commonest_answer``: share of the most frequent answer; a policy that collapsed comes near 1.
    """
    answers = Counter(_answer(row["response"]) for row in scored)
    return {"commonest_answer": max(answers.values()) / len(scored)}


if __name__ == "__main__":
    evaluate(compute_score, metrics)
