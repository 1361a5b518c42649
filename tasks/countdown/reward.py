"""Countdown's reward: 0.0 nothing usable, 0.1 a well-formed expression, 0.3 exactly the given numbers, 1.0 correct."""

from collections import Counter

from tasks.common.rewards.answers import last_answer, read_ground_truth, reward_function
from tasks.common.rewards.expression import parse_expression


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score one response.

    ``ground_truth`` is ``{"target": int, "numbers": [int, ...]}`` or that as JSON text. Returns the same keys for every
    row: ``score`` in {0.0, 0.1, 0.3, 1.0}; ``acc``, ``format`` (a well-formed expression) and ``numbers`` (each given
    number exactly once, no other) in {0.0, 1.0}.
    """
    truth = read_ground_truth(ground_truth)
    answer = last_answer(solution_str)
    parsed = parse_expression(answer) if answer else None
    well_formed = parsed is not None
    right_numbers = well_formed and Counter(parsed[1]) == Counter(truth["numbers"])
    correct = right_numbers and parsed[0] == truth["target"]
    score = 1.0 if correct else 0.3 if right_numbers else 0.1 if well_formed else 0.0
    return {"score": score, "acc": correct, "format": well_formed, "numbers": right_numbers}


def wrong_forms(response: str) -> list[str]:
    """What the gold check makes of a right response, none of it right: it stands in the thinking, uses a number that is
    not given, is other arithmetic."""
    changed = [response.replace("</answer>", f"{more}</answer>") for more in ("+1-1", "**1")]
    return [f"<think>{response}</think>", *changed]
