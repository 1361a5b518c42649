"""GRPO (Shao et al. 2024, arXiv 2402.03300): advantages normalised in the group of a prompt, KL as a loss."""

from verl_tasks.settings import Settings


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


def problem(config) -> str | None:
    """Why a method that compares samples cannot train with verl's composed ``config``, in one line; else None.

    verl takes the reward itself as the advantage of a group of one (trainer/ppo/core_algos.py).
    """
    if config.actor_rollout_ref.rollout.n < 2:
        return "ROLLOUT_N=1: METHOD compares the samples of a prompt; take 2 or more, or METHOD=ppo"
    return None


def warning(config, low: float = 0.2, high: float = 0.2) -> str | None:
    """What to know before a run with ``config``, the composed config of verl; ``low``, ``high``: the method's clip."""
    actor = config.actor_rollout_ref.actor
    clips = (("CLIP_LOW", actor.clip_ratio_low, low), ("CLIP_HIGH", actor.clip_ratio_high, high))
    given = [f"{name}={value:g}" for name, value, default in clips if value != default]
    return one_update(" ".join(given), config) if given else None


def one_update(what: str, config) -> str | None:
    """A warning where ``what`` makes a difference from a step's second mini-batch on, and there is only one."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.get("rollout_correction") or {}
    if actor.ppo_mini_batch_size < config.data.train_batch_size or actor.ppo_epochs > 1:
        return None
    if correction.get("bypass_mode"):  # the ratios are to the engine's probabilities
        return None
    size, left = divmod(config.data.train_batch_size, 4)
    other = "a TRAIN_BATCH_SIZE that 4 divides" if left else f"MINI_BATCH_SIZE={size}"
    return f"{what} with one mini-batch a step: all ratios are 1, which is plain policy gradient; {other} makes 4"
