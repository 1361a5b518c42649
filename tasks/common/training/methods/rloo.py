"""RLOO (Ahmadian et al. 2024, arXiv 2402.14740): the reward minus the mean of the other samples of the prompt."""

from verl_tasks.settings import Settings
from verl_tasks.training.methods import grpo

warning = grpo.warning


def overrides(s: Settings) -> list[str]:
    """What RLOO sets in verl's config. The KL is taken off the reward, as in the paper."""
    return [
        "algorithm.adv_estimator=rloo",
        f"algorithm.use_kl_in_reward={s.KL_COEF > 0}",
        f"algorithm.kl_ctrl.kl_coef={s.KL_COEF}",
    ]


def problem(config) -> str | None:
    """Why RLOO cannot train with verl's composed ``config`` (a DictConfig), in one line; None where it can."""
    if config.actor_rollout_ref.rollout.n < 2:
        return "ROLLOUT_N=1: METHOD=rloo needs other samples of a prompt; take 2 or more"
    return None
