"""Countdown's evaluation: the shared one, and how the policy fools itself (or the reward)."""

import functools
from collections import Counter

from tasks.countdown.reward import compute_score
from verl_tasks import evaluate, last_answer, parse_expression


@functools.cache  # the bootstrap asks for the same completions again and again
def _operators(response: str) -> frozenset[str] | None:
    """The operators in the answer of a completion, None without an expression."""
    answer = last_answer(response)
    if not answer or not parse_expression(answer):
        return None
    return frozenset("+-*/").intersection(answer.partition("=")[0])


def metrics(scored: list[dict]) -> dict[str, float]:
    """Of the sampled completions, each in [0, 1]. ``one_operator``: among answers that are an expression, the share of
    those that use only the operator most used alone (a policy that always multiplies comes near 1). ``wrong_numbers``:
    expressions that do not use exactly the given numbers."""
    operators = [found for row in scored if (found := _operators(row["response"])) is not None]
    alone = [count for used, count in Counter(operators).items() if len(used) == 1]
    wrong = sum(row["reward"]["format"] - row["reward"]["numbers"] for row in scored)
    return {"one_operator": max(alone, default=0) / max(1, len(operators)), "wrong_numbers": wrong / len(scored)}


if __name__ == "__main__":
    evaluate(compute_score, metrics)
