"""CISPO (MiniMax-M1, arXiv 2506.13585): the weight of a token is clipped, its gradient is not; every token counts."""

import functools

from verl_tasks.settings import Settings
from verl_tasks.training.methods import grpo

# Weights in [0, 5], of all tokens alike. The paper gives no number for its upper bound; 5 is that of ScaleRL (arXiv
# 2510.13786) and TRL's documentation.
DEFAULTS = {"CLIP_LOW": "1.0", "CLIP_HIGH": "4.0"}
# The first of a step's mini-batches is on-policy: all weights are 1.
MINI_BATCHES = 4
problem = grpo.problem
warning = functools.partial(grpo.one_update, "METHOD=cispo")


def overrides(s: Settings) -> list[str]:
    """What CISPO sets in verl's config."""
    return [
        *grpo.overrides(s),
        "actor_rollout_ref.actor.policy_loss.loss_mode=cispo",
        "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    ]
