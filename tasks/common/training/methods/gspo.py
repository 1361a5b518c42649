"""GSPO (Zheng et al. 2025, arXiv 2507.18071): GRPO's advantages; ratio and clip of whole sequences, not of tokens."""

from tasks.common.settings import Settings
from tasks.common.training.methods import grpo

DEFAULTS = {"CLIP_LOW": "3e-4", "CLIP_HIGH": "4e-4"}  # of sequences: the paper's (section 5.1)
# The first of a step's mini-batches is on-policy: its ratios are 1 and nothing is clipped.
MINI_BATCHES = 4
problem = grpo.problem


def overrides(s: Settings) -> list[str]:
    """What GSPO sets in verl's config."""
    return [
        *grpo.overrides(s),
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    ]


def warning(config) -> str | None:
    """What to know before a run with ``config``, the composed config of verl."""
    return one_update("gspo", config)


def one_update(name: str, config) -> str | None:
    """A warning where the METHOD ``name``, which differs from the second mini-batch on, gets only one."""
    actor = config.actor_rollout_ref.actor
    if actor.ppo_mini_batch_size < config.data.train_batch_size or actor.ppo_epochs > 1:
        return None
    size, left = divmod(config.data.train_batch_size, MINI_BATCHES)
    other = f"a TRAIN_BATCH_SIZE that {MINI_BATCHES} divides" if left else f"MINI_BATCH_SIZE={size}"
    why = "all ratios are 1, which is plain policy gradient"
    return f"METHOD={name} with one mini-batch a step: {why}; {other} makes {MINI_BATCHES}"
