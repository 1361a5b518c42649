"""The reward: 0.0 no answer, 0.1 an answer, 1.0 the right one. FILL IN: partial credit."""

from tasks.common.rewards.answers import reward_function
from tasks.common.rewards.math_answer import compare, find_answer, read_number


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score one response (``solution_str``) against the ``ground_truth``: a number, or a formula in LaTeX, as text.

    The answer is what stands after the last ``####``, else in the last ``\\boxed{}``, else in the last "the answer is"
    sentence. Returns the same keys for every row: ``score``, what is trained on; ``acc``, 1.0 if right; ``format``, 1.0
    if there is an answer to judge. More keys are logged as they are. Model output is hostile: never eval, exec or
    unpickle it.
    """
    answer, truth = find_answer(solution_str), str(ground_truth)
    well_formed = right = False
    # Where the truth is a number the answer must be one too: 5 + 7 is no answer to 5 + 7.
    if answer and (read_number(answer.text) is not None or read_number(truth) is None):
        well_formed, right = compare(answer.text, truth)
    score = 1.0 if right else 0.1 if well_formed else 0.0
    return {"score": score, "acc": float(right), "format": float(well_formed)}
