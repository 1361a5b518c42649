"""The reward: what a model behind an OpenAI-compatible API gives the answer by a rubric (docs/JUDGE.md).

Set JUDGE_URL and JUDGE_MODEL before training. FILL IN: RUBRIC.
"""

from tasks.common.rewards import judge
from tasks.common.rewards.answers import after_thinking, read_ground_truth, reward_function

RUBRIC = "The answer does what the question asks, in correct sentences, and agrees with the reference if there is one."


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score one response (``solution_str``) to ``ground_truth``: ``{"question": str, "reference": str}``.

    Returns the same keys for every row: ``score``, what is trained on, the judge's 0 to 10 divided by 10; ``acc``, 1.0
    from 0.7 on; ``format``, 1.0 if there is an answer to judge. A judge that fails stops the run, it never scores 0.
    """
    truth = read_ground_truth(ground_truth)
    return judge.score(truth["question"], after_thinking(solution_str), truth["reference"], RUBRIC)
