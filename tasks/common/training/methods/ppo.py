"""PPO (Schulman et al. 2017, arXiv 1707.06347): advantages from a critic by GAE, KL taken off the reward."""

from verl_tasks.settings import Settings
from verl_tasks.training.methods import grpo

MINI_BATCHES = 4
ASYNC = False
warning = grpo.warning


def overrides(s: Settings) -> list[str]:
    """What PPO sets in verl's config. The critic begins as the policy with a new head, and is trained in full."""
    return [
        "algorithm.adv_estimator=gae",
        # kl_coef does nothing without the switch, which also makes the reference model.
        f"algorithm.use_kl_in_reward={s.KL_COEF > 0}",
        f"algorithm.kl_ctrl.kl_coef={s.KL_COEF}",
        "critic.model.path=${actor_rollout_ref.model.path}",
        f"critic.optim.lr={s.CRITIC_LR}",
        # verl updates the policy from the step on that has this number.
        f"trainer.critic_warmup={s.CRITIC_WARMUP and s.CRITIC_WARMUP + 1}",
        "critic.ppo_micro_batch_size_per_gpu=${actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu}",
        "critic.ppo_max_token_len_per_gpu=${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}",
    ]
