"""Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): GRPO without its two biases, the division by std and by length."""

from verl_tasks.settings import Settings
from verl_tasks.training.methods import grpo

problem = grpo.problem
warning = grpo.warning


def overrides(s: Settings) -> list[str]:
    """What Dr. GRPO sets in verl's config.

    The sum over a response's tokens is divided by MAX_RESPONSE_LENGTH. Without loss_scale_factor verl divides by the
    longest response of a micro-batch, which is no constant (verl/trainer/ppo/core_algos.py, agg_loss).
    """
    return [
        *grpo.overrides(s),
        "algorithm.norm_adv_by_std_in_grpo=False",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        f"actor_rollout_ref.actor.loss_scale_factor={s.MAX_RESPONSE_LENGTH}",
    ]
