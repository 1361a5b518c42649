"""GSM8K's reward: 1.0 the right final number, 0.1 another final number, 0.0 none (docs/REWARD_GSM8K.md)."""

import re

from tasks.common.rewards.answers import reward_function
from tasks.common.rewards.math_answer import compare, find_answer, read_number, tidy

VARIANTS = ("strict", "flexible")
FORMAT_SCORE = 0.1

_POWER_OF_TEN = re.compile(r"(?:\\times|\\cdot|×|\*)\s*10\s*\^")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![^{}]*\})")
# Two numbers with an operator, or nothing, between them. A sum that is left to the reader is no final number.
_UNDONE = re.compile(
    r"[+*×÷·!^]|\\(?:times|cdot|div|pm|mp|binom|sum|prod|int)|/.*/|[\d)}]\s*[-:]|[\d)}]\s*[ ,;(]\s*[(\d]"
)


def is_final(text: str) -> bool:
    """Whether ``text``, which is no plain number, may be one in LaTeX (``2\\sqrt{81}``, ``1.8 \\times 10^1``), and not
    a list, a sum still to be done (``9 * 2``: else a policy would leave out the arithmetic) or words."""
    text = _POWER_OF_TEN.sub("e", tidy(text))
    return not _UNDONE.search(text) and not _WORDS.search(text)


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, variant="strict", **kwargs) -> dict:
    """Score one response.

    ``ground_truth`` is a number as text. ``variant`` "strict": the final answer is what the last ``####``, else the
    last ``\\boxed{}``, else the last "the answer is" sentence says; "flexible": else the last number of the response.

    Returns the same keys for every row: ``score`` in {0.0, 0.1, 1.0}; in {0.0, 1.0}: ``acc``, ``format`` (a marked
    answer that is one number), and how it was marked: ``marked`` (``####``), ``boxed``, ``sentence``.
    """
    truth = str(ground_truth)
    if read_number(truth) is None:
        raise ValueError("the ground truth is not a number")
    answer = find_answer(solution_str, flexible=variant == "flexible")
    well_formed = right = False
    if answer and (read_number(answer.text) is not None or is_final(answer.text)):
        well_formed, right = compare(answer.text, truth)
    how = answer.how if answer and well_formed else ""
    well_formed = how in ("hashes", "boxed", "sentence")
    score = 1.0 if right else FORMAT_SCORE if well_formed else 0.0
    marks = {"marked": how == "hashes", "boxed": how == "boxed", "sentence": how == "sentence"}
    return {"score": score, "acc": right, "format": well_formed, **marks}
