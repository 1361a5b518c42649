"""The reward: what reasoning-gym's environment gives the answer, in a process of its own (docs/REASONING_GYM.md)."""

{% import "imports.jinja" as imports with context %}
{{ imports.sorted(["from tasks.common.rewards import gym", "from tasks.common.rewards.answers import reward_function"], "prepare_data import CONFIG, ENV") }}
_score = gym.scorer(ENV, CONFIG)


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score one response (``solution_str``) against the ``ground_truth``, an entry of the environment.

    The answer is what stands in the last ``<answer></answer>``. Returns the same keys for every row: ``score`` in
    [0, 1], what is trained on; ``acc``, 1.0 if that is 1; ``format``, 1.0 if there is an answer to judge; ``failed``,
    1.0 if the scorer did not survive it.
    """
    return _score(solution_str, ground_truth)
