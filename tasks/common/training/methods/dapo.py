"""DAPO (Yu et al. 2025, arXiv 2503.14476): GRPO on groups with signal alone, a wider clip upwards, long ones penalised.

verl 0.9.1 drops groups and samples others (trainer/ppo/v1/replay_buffer.py); verl_plugins/dynamic_sampling.py bounds
that. TRUNCATED=shaped, the default here, is the penalty.
"""

from verl_tasks.settings import Settings
from verl_tasks.training.methods import grpo

DEFAULTS = {"TRUNCATED": "shaped", "CLIP_LOW": "0.2", "CLIP_HIGH": "0.28"}  # the paper's (section 4.1)
# The first of a step's mini-batches is on-policy: nothing is clipped there.
MINI_BATCHES = 4
TRAINER, MODE = "verl_tasks.verl_plugins.dynamic_sampling", "dapo"
ASYNC = False
MAX_BATCHES = 10  # of prompts sampled for one step, as in the authors' scripts


def overrides(s: Settings) -> list[str]:
    """What DAPO sets in verl's config; the token-mean is the paper's (section 4.1)."""
    return [
        *grpo.overrides(s),
        "actor_rollout_ref.actor.loss_agg_mode=token-mean",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=score",  # the task's reward, without the penalty
        f"algorithm.filter_groups.max_num_gen_batches={MAX_BATCHES}",
    ]


def problem(config) -> str | None:
    """Why DAPO cannot train with verl's composed ``config`` (a DictConfig), in one line; None where it can."""
    if config.reward.reward_model.enable:
        why = "drops groups by the task's reward while it samples; REWARD_MODEL scores only after that"
        return f"METHOD=dapo: {why}; leave REWARD_MODEL out, or take another METHOD"
    return grpo.problem(config)


def warning(config) -> str | None:
    """What to know before a run with ``config``, the composed config of verl."""
    return grpo.warning(config, high=float(DEFAULTS["CLIP_HIGH"]))
