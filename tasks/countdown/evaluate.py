"""Countdown's evaluation: the shared one, and how the policy fools itself (or the reward)."""

from collections import Counter

from tasks.common.evaluation.main import main
from tasks.common.rewards.answers import last_answer
from tasks.common.rewards.expression import parse_expression
from tasks.countdown.reward import compute_score


def metrics(scored: list[dict]) -> dict[str, float]:
    """Of the sampled completions, each in [0, 1]. ``one_operator``: among answers that are an expression, the share of
    those that use only the operator most used alone (a policy that always multiplies comes near 1). ``wrong_numbers``:
    expressions that do not use exactly the given numbers."""
    answers = [last_answer(row["response"]) for row in scored]
    expressions = [answer for answer in answers if answer and parse_expression(answer)]
    alone = Counter(frozenset(c for c in answer.partition("=")[0] if c in "+-*/") for answer in expressions)
    alone = [count for operators, count in alone.items() if len(operators) == 1]
    wrong = sum(row["reward"]["format"] - row["reward"]["numbers"] for row in scored)
    return {"one_operator": max(alone, default=0) / max(1, len(expressions)), "wrong_numbers": wrong / len(scored)}


if __name__ == "__main__":
    main(compute_score, metrics)
