"""Losses and metrics of verl 0.6.1 that are not what their names say. Test: tests/test_a100_stack.py.

- ``low_var_kl+`` (trainer/ppo/core_algos.py:1424) looks for its value under that name, which has none.
- ``seq-mean-token-sum-norm`` (core_algos.py:777; METHOD=dr_grpo) is a sum over a micro-batch. The actor weighs a
  micro-batch by its share of the mini-batch: a response would weigh more among more of them.
- The metric actor/entropy (trainer/ppo/ray_trainer.py:1124) follows the loss's normaliser.
"""

import torch
from verl.trainer.ppo import core_algos, ray_trainer
from verl.workers.actor import dp_actor

from verl_tasks.verl_plugins.expect import expect

expect(
    core_algos.kl_penalty,
    "forward_score = kl_penalty_forward(logprob, ref_logprob, kl_penalty)",
    'if not kl_penalty.endswith("+")',
    "backward_score = 0.5 * (logprob - ref_logprob).square()",
)
expect(core_algos.agg_loss, "loss = torch.sum(seq_losses) / loss_mask.shape[-1]  # The divisor")
expect(dp_actor.DataParallelPPOActor, "loss_scale_factor = response_mask.shape[0] / self.config.ppo_mini_batch_size")
expect(ray_trainer.RayPPOTrainer.fit, "entropy_agg = agg_loss(")

_kl_penalty_forward, _agg_loss = core_algos.kl_penalty_forward, core_algos.agg_loss


def kl_penalty_forward(logprob, ref_logprob, kl_penalty):
    """verl's, by the name without its plus."""
    return _kl_penalty_forward(logprob, ref_logprob, kl_penalty.removesuffix("+"))


def agg_loss(loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str) -> torch.Tensor:
    """verl's, but the mean over sequences in seq-mean-token-sum-norm; a row is padded to MAX_RESPONSE_LENGTH."""
    if loss_agg_mode != "seq-mean-token-sum-norm":
        return _agg_loss(loss_mat, loss_mask, loss_agg_mode)
    return (loss_mat * loss_mask).sum(-1).mean() / loss_mask.shape[-1]


def entropy_of_a_token(loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str) -> torch.Tensor:
    """The mean over tokens, whatever the loss's mode."""
    return _agg_loss(loss_mat, loss_mask, "token-mean")


core_algos.kl_penalty_forward = kl_penalty_forward
core_algos.agg_loss = dp_actor.agg_loss = agg_loss
ray_trainer.agg_loss = entropy_of_a_token
