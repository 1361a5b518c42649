"""GRPO (Shao et al. 2024, arXiv 2402.03300): advantages normalised in the group of a prompt, KL as a loss."""

from tasks.common.settings import Settings


def overrides(s: Settings) -> list[str]:
    """What GRPO sets in verl's config."""
    return [
        "algorithm.adv_estimator=grpo",
        "algorithm.norm_adv_by_std_in_grpo=True",
        # The reference model exists only with a KL term (verl/trainer/ppo/utils.py, need_reference_policy).
        f"actor_rollout_ref.actor.use_kl_loss={s.KL_COEF > 0}",
        f"actor_rollout_ref.actor.kl_loss_coef={s.KL_COEF}",
        # The value is k3's, the gradient k2's, which is that of the KL; k3's own is not.
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl+",
    ]
