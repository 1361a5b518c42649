"""GSPO (Zheng et al. 2025, arXiv 2507.18071): GRPO's advantages; ratio and clip of whole sequences, not of tokens."""

import functools

from verl_tasks.settings import Settings
from verl_tasks.training.methods import grpo

DEFAULTS = {"CLIP_LOW": "3e-4", "CLIP_HIGH": "4e-4"}  # of sequences: the paper's (section 5.1)
# The first of a step's mini-batches is on-policy: its ratios are 1 and nothing is clipped.
MINI_BATCHES = 4
problem = grpo.problem
warning = functools.partial(grpo.one_update, "METHOD=gspo")


def overrides(s: Settings) -> list[str]:
    """What GSPO sets in verl's config."""
    return [
        *grpo.overrides(s),
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    ]
