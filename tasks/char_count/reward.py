"""The reward: 1.0 for the right number in the last \\boxed{}, else 0.0, as in verl-recipe's char_count."""

from verl_tasks import math_answer, reward_function


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score one response (``solution_str``) against the ``ground_truth``, a number as text.

    The answer is what stands after the last ``####``, else in the last ``\\boxed{}``, else in the last "the answer is"
    sentence. Returns the same keys for every row: ``score`` and ``acc``, 1.0 if right; ``format``, 1.0 if the answer is
    a number. Model output is hostile: never eval, exec or unpickle it.
    """
    answer = math_answer.find_answer(solution_str)
    well_formed = right = False
    if answer and math_answer.read_number(answer.text) is not None:
        well_formed, right = math_answer.compare(answer.text, str(ground_truth))
    return {"score": float(right), "acc": float(right), "format": float(well_formed)}


def wrong_forms(response: str) -> list[str]:
    """What the gold check makes of a right response, none of it right: another number, thinking, a sum to be done."""
    changed = [response.replace("\\boxed{", f"\\boxed{{{more}") for more in ("1", "0+")]
    return [f"<think>{response}</think>", *changed]
