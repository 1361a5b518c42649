"""Steps that are one update: they need no pass for the old log-probs, for the update computes the same ones itself.

on_policy.py leaves the pass out in verl 0.9.1, stacks/a100/on_policy.py in 0.6.1. TRL does not make it either.
"""

ON_POLICY = "on_policy"  # marks a batch for the actor


def applies(config, responses: int) -> bool:
    """Whether a step on ``responses`` rows makes one update, and nothing else needs the old log-probs.

    ``config`` is verl's. KL in the reward, rollout correction and distillation need them.
    """
    policy, algorithm = config.actor_rollout_ref, config.algorithm
    correction = algorithm.get("rollout_correction") or {}
    return bool(
        responses == policy.actor.ppo_mini_batch_size * policy.rollout.n
        and policy.actor.ppo_epochs == 1
        and policy.rollout.calculate_log_probs
        and not algorithm.use_kl_in_reward
        and not any(correction.get(name) for name in ("rollout_is", "rollout_rs", "bypass_mode"))
        and not (config.get("distillation") or {}).get("enabled")
    )
