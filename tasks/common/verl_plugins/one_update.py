"""Which steps are a single update, and so need no pass for the old log-probs: the update computes the same ones.

on_policy.py skips the pass in verl 0.9.1, verl_plugins/verl_061/on_policy.py in 0.6.1. TRL skips it too.
"""

ON_POLICY = "on_policy"  # marks a batch for the actor
CAP = "rollout_is_threshold"  # of the importance weights that such an update computes; 0: none

# Options of algorithm.rollout_correction that need log-probs of the whole batch before the update.
BEFORE = ("rollout_rs", "bypass_mode", "rollout_is_batch_normalize", "rollout_token_veto_threshold")


def applies(config, responses: int) -> bool:
    """Whether a step on ``responses`` rows is a single update, and nothing else needs the old log-probs.

    ``config`` is verl's. KL in the reward, distillation and rollout correction except weights of tokens need them.
    """
    policy, algorithm = config.actor_rollout_ref, config.algorithm
    correction = algorithm.get("rollout_correction") or {}
    return bool(
        responses == policy.actor.ppo_mini_batch_size * policy.rollout.n
        and policy.actor.ppo_epochs == 1
        and policy.rollout.calculate_log_probs
        and not algorithm.use_kl_in_reward
        and correction.get("rollout_is") in (None, "token")
        and not any(correction.get(name) for name in BEFORE)
        and not (config.get("distillation") or {}).get("enabled")
    )


def cap(config) -> float | str:
    """The threshold of the tokens' importance weights, in verl's form; 0 without such weights."""
    correction = config.algorithm.get("rollout_correction") or {}
    return correction.rollout_is_threshold if correction.get("rollout_is") else 0
