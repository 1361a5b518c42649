"""GSM8K's reward: 1.0 the right final number, else 0.0 (README.md), as verl's (utils/reward_score/gsm8k.py)."""

from verl_tasks import math_answer, reward_function

VARIANTS = ("strict", "flexible")


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, variant="strict", **kwargs) -> dict:
    """Score one response.

    ``ground_truth`` is a number as text. ``variant`` "strict": the final answer is what the last ``####``, else the
    last ``\\boxed{}``, else the last "the answer is" sentence says; "flexible": else the last number of the response.

    Returns the same keys for every row, each in {0.0, 1.0}: ``score`` and ``acc`` (right), ``format`` (a marked answer
    that is one number), and how it was marked: ``marked`` (``####``), ``boxed``, ``sentence``.
    """
    truth = math_answer.read_number(str(ground_truth))
    if truth is None:
        raise ValueError("the ground truth is not a number")
    answer = math_answer.find_answer(solution_str, flexible=variant == "flexible")
    # Plain numbers only: in other LaTeX (9\\sqrt{4}) the arithmetic that math-verify would do is left undone.
    number = math_answer.read_number(answer.text) if answer else None
    right = number is not None and number == truth
    how = answer.how if number is not None else ""
    well_formed = how in ("hashes", "boxed", "sentence")
    marks = {"marked": how == "hashes", "boxed": how == "boxed", "sentence": how == "sentence"}
    return {"score": right, "acc": right, "format": well_formed, **marks}


def wrong_forms(response: str) -> list[str]:
    """What the gold check makes of a right response, none of it right: it stands in the thinking, hedges, leaves a sum
    to the reader, has one more digit. See README.md."""
    return [f"<think>{response}</think>", *(response.rstrip() + more for more in (" or 7", " * 1", "1"))]
