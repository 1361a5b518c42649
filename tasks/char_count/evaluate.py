"""Evaluation of the task: the shared one (tasks/common/evaluation/main.py) and the task's own metrics."""

from collections import Counter

from tasks.char_count.reward import compute_score
from tasks.common.evaluation.main import main
from tasks.common.rewards.math_answer import find_answer


def metrics(scored: list[dict]) -> dict[str, float]:
    """The task's own metrics, from the sampled completions; every key of the reward is reported without them.

    ``commonest_answer``: share of the most frequent answer; a policy that collapsed comes near 1.
    """
    found = (find_answer(row["response"]) for row in scored)
    answers = Counter(answer.text if answer else "" for answer in found)
    return {"commonest_answer": max(answers.values()) / len(scored)}


if __name__ == "__main__":
    main(compute_score, metrics)
