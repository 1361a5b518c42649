"""RLOO (Ahmadian et al. 2024, arXiv 2402.14740): the reward minus the mean of the other samples of the prompt."""

from verl_tasks.settings import Settings
from verl_tasks.training.methods import grpo

problem = grpo.problem
warning = grpo.warning


def overrides(s: Settings) -> list[str]:
    """What RLOO sets in verl's config. The KL is taken off the reward, as in the paper."""
    return [
        "algorithm.adv_estimator=rloo",
        f"algorithm.use_kl_in_reward={s.KL_COEF > 0}",
        f"algorithm.kl_ctrl.kl_coef={s.KL_COEF}",
    ]
