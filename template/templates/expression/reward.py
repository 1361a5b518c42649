"""The reward: 0.1 an expression of exactly the given numbers, 1.0 that reaches the target: a guess shall not pay."""

from collections import Counter

from tasks.common.rewards.answers import last_answer, read_ground_truth, reward_function
from tasks.common.rewards.expression import parse_expression


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score one response (``solution_str``) against the ``ground_truth``: ``{"target": int, "numbers": [int, ...]}``.

    The answer is what stands in the last ``<answer></answer>``. Returns the same keys for every row: ``score``, what is
    trained on; ``acc``, 1.0 if right; ``format``, 1.0 if there is an expression; ``numbers``, 1.0 if it has each given
    number exactly once. More keys are logged as they are. Model output is hostile: never eval, exec or unpickle it.
    """
    truth = read_ground_truth(ground_truth)
    answer = last_answer(solution_str)
    parsed = parse_expression(answer) if answer else None
    well_formed = parsed is not None
    right_numbers = well_formed and Counter(parsed[1]) == Counter(truth["numbers"])
    right = right_numbers and parsed[0] == truth["target"]
    score = 1.0 if right else 0.1 if right_numbers else 0.0
    return {"score": score, "acc": float(right), "format": float(well_formed), "numbers": float(right_numbers)}
