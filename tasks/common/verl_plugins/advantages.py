"""Advantages of batches that teach nothing. Both versions' patches.py load this in every verl process.

Groups whose rewards are all the same: exactly 0. verl takes the mean of float32 rewards, which of eight times 0.8 is
not 0.8, and divides what rounding leaves by a standard deviation no larger + 1e-6: each response has -0.056, of 0.1
-0.007; whitening (reinforce_pp) divides it by 1e-4. Where no group teaches, Adam makes a whole step of that, and no
health rule sees it.

Whitened ones (ppo, reinforce_pp) of a batch whose tokens have one value: 0, not the rounding of their mean. Also where
at most one token counts, and verl raises: TRUNCATED=masked and ROLLOUT_CORRECTION=sequence may leave such a batch.
"""

import functools
from collections import defaultdict

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional

from verl_tasks.verl_plugins.expect import expect


def exact(estimate):
    """``estimate``, an estimator of verl, for which groups of several responses with one reward have the reward 0: its
    mean is exact."""

    @functools.wraps(estimate)
    def estimated(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, **options):
        groups = defaultdict(list)
        for prompt, reward in zip(index, token_level_rewards.sum(-1).tolist(), strict=True):
            groups[prompt].append(reward)
        alike = [len(groups[prompt]) > 1 and len({*groups[prompt]}) == 1 for prompt in index]
        alike = torch.tensor(alike, device=response_mask.device)[:, None]
        return estimate(token_level_rewards.masked_fill(alike, 0), response_mask, index=index, **options)

    return estimated


for _name in ("grpo", "rloo", "reinforce_plus_plus_baseline"):
    _estimate = core_algos.get_adv_estimator_fn(_name)
    expect(_estimate, "scores = token_level_rewards.sum(dim=-1)", "torch.mean(")
    core_algos.ADV_ESTIMATOR_REGISTRY[_name] = exact(_estimate)
core_algos.compute_grpo_outcome_advantage = core_algos.ADV_ESTIMATOR_REGISTRY["grpo"]

expect(core_algos.compute_gae_advantage_return, "verl_F.masked_whiten(advantages, response_mask)")

_masked_whiten = torch_functional.masked_whiten


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """verl's (utils/torch_functional.py); 0 where there is no variance to divide by. Shapes (responses, tokens)."""
    differ = values[mask.bool()].unique().numel() > 1
    return _masked_whiten(values, mask, shift_mean) if differ else torch.zeros_like(values)


torch_functional.masked_whiten = masked_whiten
