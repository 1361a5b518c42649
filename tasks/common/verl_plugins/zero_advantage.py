"""Responses whose advantages are all 0 go forward only, with verl 0.9.1: their gradient is 0.

Where all samples of a prompt have one reward, verl computes that gradient all the same. Here such responses get
micro-batches of their own, without a backward pass. Metrics, and the counts that a loss is divided by, stay those of
the whole mini-batch. tinker-cookbook leaves such groups out (remove_constant_reward_groups in rl/data_processing.py);
then neither entropy nor mismatch is measured there. patches.py loads this in every verl process.
"""

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.device import get_device_id
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

import verl_tasks.verl_plugins.prompts_once  # noqa: F401  (its micro-batches are those that are made here of each part)
from verl_tasks.verl_plugins.expect import expect

ALLOWED = "zero_advantage"  # marks a batch for the actor
LOSSES = ("vanilla", "gspo", "cispo")  # each of their terms is a multiple of the advantage

expect(
    transformer_impl.FSDPEngine.forward_backward_batch,
    "batch_num_tokens=batch_num_tokens.item()",  # of the whole mini-batch, before it is parted
    "micro_batches, indices = prepare_micro_batches(",
    "is_last_micro_batch=micro_batch_idx == len(micro_batches) - 1",  # whose backward reduces the gradients
    "loss, meta_info = self.forward_step(",
    'meta_info.pop("model_output", None)',
)

_prepare_micro_batches = transformer_impl.prepare_micro_batches
_forward_step = FSDPEngineWithLMHead.forward_step


def applies(config) -> bool:
    """Whether the actor's loss has no other term than those of the advantages. ``config`` is verl's."""
    policy, distilled = config.actor_rollout_ref, (config.get("distillation") or {}).get("enabled")
    actor = policy.actor
    loss = actor.policy_loss.get("loss_mode", "vanilla")
    return bool(actor.entropy_coeff == 0 and not actor.use_kl_loss and not distilled and loss in LOSSES)


def rows_without(data: TensorDict, dp_group=None) -> list[int]:
    """The rows of ``data`` that go forward only: as many on every GPU, which gather weights together, and in whole
    micro-batches where these have a fixed size. Some row is left."""
    advantages, lengths = data["advantages"].values(), data["advantages"].offsets().diff()
    counted = (advantages != 0) & data["response_mask"].values().bool()
    row = torch.arange(len(data), device=lengths.device).repeat_interleave(lengths, output_size=len(counted))
    without = torch.ones(len(data), dtype=torch.bool, device=row.device)
    without[row[counted]] = False
    rows = without.nonzero()[:, 0].tolist()
    size = 1 if get_non_tensor_data(data, "use_dynamic_bsz", True) else data["micro_batch_size_per_gpu"]
    count = torch.tensor(min(len(rows), len(data) - size) // size * size, device=get_device_id())
    torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MIN, group=dp_group)
    return rows[: count.item()]


def prepare_micro_batches(data: TensorDict, dp_group=None, **how):
    """As verl's (workers/engine/utils.py); those that go forward only come first."""
    if not get_non_tensor_data(data, ALLOWED, False) or get_non_tensor_data(data, "return_model_output", False):
        return _prepare_micro_batches(data, dp_group, **how)
    without = rows_without(data, dp_group)
    if not without:
        return _prepare_micro_batches(data, dp_group, **how)
    made = []
    for rows, without_gradient in ((without, True), (sorted({*range(len(data))} - {*without}), False)):
        part = tensordict_utils.index_select_tensor_dict(data, rows)
        tensordict_utils.assign_non_tensor(part, without_gradient=without_gradient)
        made += _prepare_micro_batches(part, dp_group, **how)[0]
    return made, None  # rows by place: of outputs, and an update keeps none


def forward_step(self, micro_batch: TensorDict, loss_function, forward_only):
    if forward_only or not get_non_tensor_data(micro_batch, "without_gradient", False):
        return _forward_step(self, micro_batch, loss_function, forward_only)
    with torch.no_grad():
        loss, output = _forward_step(self, micro_batch, loss_function, forward_only)
    return loss.requires_grad_(), output  # verl calls its backward, which has nothing to do


transformer_impl.prepare_micro_batches = prepare_micro_batches
FSDPEngineWithLMHead.forward_step = forward_step
