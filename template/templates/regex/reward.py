"""The reward: 0.0 no answer, 0.1 an answer, 1.0 one that matches the pattern. FILL IN: partial credit."""

import regex

from tasks.common.rewards.answers import last_answer, reward_function

MAX_ANSWER_CHARS = 200
SECONDS = 0.1  # some patterns, such as (a+)+b, take exponential time on some answers: those do not match


def matches(pattern: str, answer: str) -> bool:
    """Whether all of ``answer`` matches ``pattern``, which is the task's own, never the model's."""
    try:
        return regex.fullmatch(pattern, answer, timeout=SECONDS) is not None
    except TimeoutError:
        return False


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score one response (``solution_str``) against the ``ground_truth``, a regular expression.

    The answer is what stands in the last ``<answer></answer>``. Returns the same keys for every row: ``score``, what is
    trained on; ``acc``, 1.0 if right; ``format``, 1.0 if there is an answer of at most 200 characters. More keys are
    logged as they are. Model output is hostile: never eval, exec or unpickle it.
    """
    answer = last_answer(solution_str)
    well_formed = bool(answer) and len(answer) <= MAX_ANSWER_CHARS
    right = well_formed and matches(ground_truth, answer)
    score = 1.0 if right else 0.1 if well_formed else 0.0
    return {"score": score, "acc": float(right), "format": float(well_formed)}
