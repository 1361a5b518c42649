"""Countdown's reward, after a thought that calculates: 1.0 correct, 0.1 the given numbers; else 0.0 (README.md)."""

from collections import Counter

from verl_tasks import answers, expression, last_answer, parse_expression, read_ground_truth, reward_function

VARIANTS = ("thought", "right", "ladder")


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, variant="thought", **kwargs) -> dict:
    """Score one response.

    ``ground_truth`` is ``{"target": int, "numbers": [int, ...]}``, texts in place of numbers too, or that as JSON text.
    ``variant`` (the setting REWARD): "thought" pays only after a thought that calculates: 1.0 for a correct answer, 0.1
    for exactly the given numbers; "right" pays the 1.0 alone; "ladder" pays 1.0, 0.3 and 0.1 for any expression,
    thought or not. Returns the same keys for every row: ``score``; ``acc`` (correct, thought or not), ``format`` (a
    well-formed expression), ``numbers`` (each given number exactly once, no other) and ``thinking`` (a true calculation
    with given numbers) in {0.0, 1.0}.
    """
    truth = read_ground_truth(ground_truth)
    answer = last_answer(solution_str)
    parsed = parse_expression(answer) if answer else None
    well_formed = parsed is not None
    given, target = Counter(map(expression.as_number, truth["numbers"])), expression.as_number(truth["target"])
    right_numbers = well_formed and Counter(parsed[1]) == given
    correct = right_numbers and parsed[0] == target
    thinking = any(Counter(used) <= given for used in expression.calculations(answers.thought(solution_str)))
    if variant == "ladder":
        score = 1.0 if correct else 0.3 if right_numbers else 0.1 if well_formed else 0.0
    else:
        partial = 0.1 if right_numbers and variant == "thought" else 0.0
        score = (1.0 if correct else partial) if thinking else 0.0
    return {"score": score, "acc": correct, "format": well_formed, "numbers": right_numbers, "thinking": thinking}


def wrong_forms(response: str) -> list[str]:
    """What the gold check makes of a right response, none of it right: it stands in the thinking, uses a number that is
    not given, is other arithmetic."""
    changed = [response.replace("</answer>", f"{more}</answer>") for more in ("+1-1", "**1")]
    return [f"<think>{response}</think>", *changed]
