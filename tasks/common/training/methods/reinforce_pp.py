"""REINFORCE++-baseline (Hu et al. 2025, arXiv 2501.03262): minus the mean of the group, divided by the batch's std.

Of the paper's two, the one for several samples of a prompt. With ROLLOUT_N=1 it is REINFORCE++ itself: there is no
group, and mean and std are the batch's.
"""

from verl_tasks.settings import Settings
from verl_tasks.training.methods import grpo

warning = grpo.warning


def overrides(s: Settings) -> list[str]:
    """What REINFORCE++-baseline sets in verl's config."""
    return [*grpo.overrides(s), "algorithm.adv_estimator=reinforce_plus_plus_baseline"]
