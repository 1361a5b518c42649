"""Countdown's reward: 1.0 a correct answer after a thought that calculates, else 0.0 (README.md)."""

from collections import Counter

from verl_tasks import answers, expression, last_answer, parse_expression, read_ground_truth, reward_function


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score one response.

    ``ground_truth`` is ``{"target": int, "numbers": [int, ...]}``, texts in place of numbers too, or that as JSON text.
    Returns the same keys for every row, each in {0.0, 1.0}: ``score``; ``acc`` (correct, thought or not), ``format`` (a
    well-formed expression), ``numbers`` (each given number exactly once, no other) and ``thinking`` (a true calculation
    with given numbers).
    """
    truth = read_ground_truth(ground_truth)
    answer = last_answer(solution_str)
    parsed = parse_expression(answer) if answer else None
    well_formed = parsed is not None
    given, target = Counter(map(expression.as_number, truth["numbers"])), expression.as_number(truth["target"])
    right_numbers = well_formed and Counter(parsed[1]) == given
    correct = right_numbers and parsed[0] == target
    thinking = any(Counter(used) <= given for used in expression.calculations(answers.thought(solution_str)))
    score = correct and thinking
    return {"score": score, "acc": correct, "format": well_formed, "numbers": right_numbers, "thinking": thinking}


def wrong_forms(response: str) -> list[str]:
    """What the gold check makes of a right response, none of it right: it stands in the thinking, uses a number that is
    not given, is other arithmetic."""
    changed = [response.replace("</answer>", f"{more}</answer>") for more in ("+1-1", "**1")]
    return [f"<think>{response}</think>", *changed]
