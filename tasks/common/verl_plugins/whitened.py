"""Whitened advantages (ppo, reinforce_pp) of a batch in which at most one token counts. verl raises there.

TRUNCATED=masked and ROLLOUT_CORRECTION=sequence may leave such a batch. Both versions' patches.py
load this in every verl process.
"""

import torch
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional

from verl_tasks.verl_plugins.expect import expect

expect(core_algos.compute_gae_advantage_return, "verl_F.masked_whiten(advantages, response_mask)")

_masked_whiten = torch_functional.masked_whiten


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """verl's (utils/torch_functional.py); 0 where there is no variance to divide by. Shapes (responses, tokens)."""
    return _masked_whiten(values, mask, shift_mean) if mask.sum() > 1 else torch.zeros_like(values)


torch_functional.masked_whiten = masked_whiten
