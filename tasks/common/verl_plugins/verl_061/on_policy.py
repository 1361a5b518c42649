"""As verl_plugins/on_policy.py, for verl 0.6.1: skip the pass for the old log-probs where a step is a single update.

verl 0.6.1 uses the update's own log-probs there (workers/actor/dp_actor.py, ``on_policy``), but still makes the pass.
patches.py loads this in every verl process.
"""

from unittest import mock

import torch
from verl import DataProto
from verl.trainer.ppo import rollout_corr_helper
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.debug import metrics as verl_metrics
from verl.workers.actor.dp_actor import DataParallelPPOActor

from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.one_update import CAP, ON_POLICY, applies, cap

expect(
    DataParallelPPOActor,
    "on_policy = len(mini_batches) == 1 and self.config.ppo_epochs == 1",
    "old_log_prob = log_prob.detach()",
    "entropy, log_prob = self._forward_micro_batch(\n                        model_inputs,",
    'rollout_is_weights = model_inputs.get("rollout_is_weights", None)',
    "from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs",
    'micro_batch_metrics["actor/kl_loss"] = kl_loss.detach().item() * loss_scale_factor',
)
expect(
    RayPPOTrainer.fit,
    "old_log_prob = self.actor_rollout_wg.compute_log_prob(batch)",
    'entropys = old_log_prob.batch["entropys"]',
    "from verl.utils.debug.metrics import calculate_debug_metrics",
    "import compute_rollout_correction_and_add_to_batch",
    "metrics.update(actor_output_metrics)",
)

PASSED = "passed"  # marks a batch that verl makes its pass for: with bypass_mode it makes none
CORRECTION = "rollout_corr/"

_init_workers = RayPPOTrainer.init_workers


def init_workers(self) -> None:
    """verl's. ``compute_log_prob`` then marks the batch; where a step is one update, it returns unused values."""
    _init_workers(self)
    # Without fused kernels the update would keep what the gradient of the entropy needs.
    skips = self.config.actor_rollout_ref.model.use_fused_kernels and not self.config.trainer.critic_warmup
    compute_log_prob = self.actor_rollout_wg.compute_log_prob

    def without_pass(batch: DataProto) -> DataProto:
        if not skips or not applies(self.config, len(batch)):
            batch.meta_info[PASSED] = True
            return compute_log_prob(batch)
        batch.meta_info |= {ON_POLICY: True, CAP: cap(self.config)}
        sampled = batch.batch["rollout_log_probs"]
        given = {"temperature": self.config.actor_rollout_ref.rollout.temperature}  # the update reads it
        return DataProto.from_dict({"old_log_probs": sampled, "entropys": torch.zeros_like(sampled)}, meta_info=given)

    self.actor_rollout_wg.compute_log_prob = without_pass


RayPPOTrainer.init_workers = init_workers


def with_a_token(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``batch``, or one of equal log-probs where none of its tokens counts (TRUNCATED=masked).

    verl's metrics and weights raise there, and each worker must have the same metrics.
    """
    if batch["response_mask"].any():
        return batch
    zeros = torch.zeros_like(batch["rollout_log_probs"])
    equal = {"response_mask": torch.ones_like(batch["response_mask"]), "old_log_probs": zeros}
    return batch | equal | {"rollout_log_probs": zeros}


# ``fit`` calls these two of the whole batch.
_debug_metrics = verl_metrics.calculate_debug_metrics
_correction_added = rollout_corr_helper.compute_rollout_correction_and_add_to_batch


def debug_metrics(batch: DataProto) -> dict:
    """verl's; none of a batch without a token that counts."""
    return _debug_metrics(batch) if batch.batch["response_mask"].any() else {}


def correction_added(batch: DataProto, config) -> tuple[DataProto, dict]:
    """verl's; ``batch`` as it is where no token counts."""
    return _correction_added(batch, config) if batch.batch["response_mask"].any() else (batch, {})


verl_metrics.calculate_debug_metrics = debug_metrics
rollout_corr_helper.compute_rollout_correction_and_add_to_batch = correction_added

_metrics_from_logprobs = rollout_corr_helper.compute_rollout_corr_metrics_from_logprobs


def metrics_from_logprobs(
    log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """verl's, which the update calls for each micro-batch."""
    batch = {"old_log_probs": log_prob, "rollout_log_probs": rollout_log_prob, "response_mask": response_mask}
    batch = with_a_token(batch)
    return _metrics_from_logprobs(batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"])


rollout_corr_helper.compute_rollout_corr_metrics_from_logprobs = metrics_from_logprobs


def weighed(batch: dict[str, torch.Tensor], limit: float) -> tuple[torch.Tensor, dict]:
    """verl's truncated importance weights of tokens, shape (responses, tokens), and its metrics of them."""
    ratio = batch["old_log_probs"] - batch["rollout_log_probs"]
    weights, found = compute_rollout_correction_weights(ratio, batch["response_mask"], "token", limit)
    return weights, {CORRECTION + name: value for name, value in found.items()}


_update_policy = DataParallelPPOActor.update_policy


def _with_kl_of_a_token(self, data: DataProto) -> dict:
    """verl's; its metric of the KL is nats a token, over all responses of this worker.

    verl's own follows the loss's mode, and is divided by the number of micro-batches.
    """
    if not self.config.use_kl_loss:
        return _update_policy(self, data)
    kls, masks, forward = [], [], self._forward_micro_batch

    def forward_and_keep(inputs, temperature, calculate_entropy=False):
        entropy, log_probs = forward(inputs, temperature=temperature, calculate_entropy=calculate_entropy)
        kls.append(kl_penalty(log_probs.detach(), inputs["ref_log_prob"], self.config.kl_loss_type))
        masks.append(inputs["response_mask"])
        return entropy, log_probs

    with mock.patch.object(self, "_forward_micro_batch", forward_and_keep):
        metrics = _update_policy(self, data)
    return metrics | {"actor/kl_loss": [agg_loss(torch.cat(kls), torch.cat(masks), "token-mean").item()]}


def update_policy(self, data: DataProto) -> dict:
    """verl's. For an ON_POLICY batch it adds the metrics of the pass, over all responses of this worker.

    After verl's pass it leaves out CORRECTION, which would replace the pass's: the policy has moved on since.
    """
    if not data.meta_info.get(ON_POLICY):
        metrics, passed = _with_kl_of_a_token(self, data), data.meta_info.get(PASSED)
        return {name: values for name, values in metrics.items() if not (passed and name.startswith(CORRECTION))}
    parts, forward, limit = [], self._forward_micro_batch, data.meta_info[CAP]

    def forward_and_keep(inputs, temperature, calculate_entropy=False):
        entropy, log_probs = forward(inputs, temperature=temperature, calculate_entropy=True)
        kept = {name: inputs[name] for name in ("responses", "response_mask", "rollout_log_probs")}
        parts.append(kept | {"old_log_probs": log_probs.detach(), "entropy": entropy.detach()})
        if limit:  # in place of the trainer's, which have no log-probs to be taken from
            inputs["rollout_is_weights"], _ = weighed(with_a_token(parts[-1]), limit)
        return entropy if calculate_entropy else None, log_probs

    with mock.patch.object(self, "_forward_micro_batch", forward_and_keep):
        metrics = _with_kl_of_a_token(self, data)
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    entropy = agg_loss(batch.pop("entropy"), batch["response_mask"], "token-mean")
    batch = with_a_token(batch)
    found = debug_metrics(DataProto.from_dict(batch)) | {"actor/entropy": entropy}
    if limit:
        found |= weighed(batch, limit)[1]
    return metrics | {name: [float(value)] for name, value in found.items()}


DataParallelPPOActor.update_policy = update_policy
