"""The reward: 0.0 no answer, 0.1 an answer, 1.0 the right one. FILL IN: partial credit."""

from tasks.common.rewards.answers import last_answer, reward_function


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score one response (``solution_str``) against the ``ground_truth``, the text that is right.

    The answer is what stands in the last ``<answer></answer>``. Returns the same keys for every row: ``score``, what is
    trained on; ``acc``, 1.0 if right; ``format``, 1.0 if there is an answer to judge. More keys are logged as they are.
    Model output is hostile: never eval, exec or unpickle it.
    """
    answer = last_answer(solution_str)
    well_formed = bool(answer)
    right = well_formed and answer.lower().split() == str(ground_truth).lower().split()
    score = 1.0 if right else 0.1 if well_formed else 0.0
    return {"score": score, "acc": float(right), "format": float(well_formed)}
