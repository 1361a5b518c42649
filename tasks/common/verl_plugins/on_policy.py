"""Skip the pass for the old log-probs where a step is a single update, with verl 0.9.1.

The ratio of PPO and GRPO uses the log-probs before the step's first update. In a single update they are the ones that
the update computes itself, as in TRL. The update also measures the metrics that verl takes from the pass, and computes
the importance weights of tokens (algorithm.rollout_correction). patches.py loads this in every verl process.
"""

from contextlib import contextmanager

import torch
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_weights,
)
from verl.utils import tensordict_utils
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.metric import AggregationType, Metric
from verl.workers import engine_workers
from verl.workers.utils import losses

from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.nested import no_padding_2_padding, response_from_nested, response_to_nested
from verl_tasks.verl_plugins.one_update import CAP, ON_POLICY

CORRECTION = "rollout_corr/"
MEASURED = ("training/", CORRECTION)  # metrics that verl takes from the pass
# Means over tokens. verl aggregates the other metrics over micro-batches, by mean or extreme.
OVER_TOKENS = [CORRECTION + name for name in ("kl", "k3_kl", "chi2_token", "rollout_is_mean")]
OVER_TOKENS += [f"{CORRECTION}rollout_is_ratio_fraction_{end}" for end in ("high", "low")]
OVER_TOKENS += ["training/rollout_probs_diff_mean"]
# The same, of verl's loss, where ratios are not all 1. zero_advantage.py makes micro-batches by the advantage, on which
# clipping depends.
OF_RATIOS = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")

expect(
    engine_workers.ppo_loss,
    'old_log_prob = data["old_log_probs"]',
    'entropy = model_output.get("entropy", None)',
    'if "rollout_is_weights" in data:',
    'metrics["kl_loss"] = Metric(value=kl_loss, aggregation=metric_aggregation)',
)
expect(engine_workers.ActorRolloutRefWorker.init_model, "self.loss_fn = partial(ppo_loss, config=actor_config)")


@contextmanager
def set_to(config, name: str, value):
    """``config`` with another value while the block runs."""
    before, config[name] = config[name], value
    try:
        yield
    finally:
        config[name] = before


def taken_out(metrics: dict) -> dict:
    """``metrics`` of an update; those that replace metrics of the pass get verl's names for them."""
    names = {name: name.removeprefix("actor/") for name in metrics}
    return {short if short.startswith(MEASURED) else name: metrics[name] for name, short in names.items()}


def measured(config, log_probs: torch.Tensor, entropy: torch.Tensor, data: TensorDict) -> dict:
    """The metrics of the pass for one micro-batch; verl takes their mean or largest value over micro-batches.

    ``log_probs``, ``entropy``: shape (responses, tokens), nats; ``data`` has ``response_mask`` and
    ``rollout_log_probs``, nested. The entropy is a part of the mean over the whole batch, as the loss is.
    """
    batch = data.select("response_mask", "rollout_log_probs", "responses").to_padded_tensor()
    mask = batch["response_mask"].bool()
    batch["old_log_probs"] = log_probs
    found = {}
    if mask.any():  # TRUNCATED=masked may leave a micro-batch without a token
        with torch.autocast(log_probs.device.type, enabled=False):  # the loss is computed under it
            found = calculate_debug_metrics(DataProto(batch=batch))
            found |= compute_rollout_corr_metrics_from_logprobs(log_probs, batch["rollout_log_probs"], mask)
    total = agg_loss(entropy, mask, "token-mean", **config.global_batch_info)  # nats a token, whatever the loss's mode
    return found | {"entropy": Metric(AggregationType.SUM, total)}


def weighed(log_probs: torch.Tensor, data: TensorDict, cap: float | str) -> tuple[torch.Tensor, dict]:
    """Truncated importance weights of one micro-batch's tokens, nested, and verl's metrics of them.

    exp(log_probs - rollout_log_probs), at most ``cap``, as verl computes them from its pass. ``log_probs``: of the
    update, without a gradient, shape (responses, tokens).
    """
    batch = data.select("response_mask", "rollout_log_probs").to_padded_tensor()
    ratio = log_probs - batch["rollout_log_probs"]
    with torch.autocast(log_probs.device.type, enabled=False):
        weights, found = compute_rollout_correction_weights(ratio, batch["response_mask"], "token", cap)
    metrics = {CORRECTION + name: value for name, value in found.items()}
    return response_to_nested(weights, data["response_mask"]), metrics


def parts(means: dict[str, float], data: TensorDict) -> dict[str, Metric]:
    """What the ``means`` over the tokens of a micro-batch are of those over all tokens of the batch."""
    share = data["response_mask"].values().sum().item() / data["batch_num_tokens"] * data["dp_size"]
    return {name: Metric(AggregationType.SUM, mean * share) for name, mean in means.items()}


def of_the_batch(metrics: dict, data: TensorDict, cap: float | str) -> dict:
    """``metrics`` of a micro-batch; OVER_TOKENS become its part of the mean over all tokens of the batch.

    Without a token the part is 0: verl wants as many parts from every GPU. ``cap``: 0 without importance weights.
    """
    names = [name for name in OVER_TOKENS if cap or "rollout_is" not in name]
    return metrics | parts({name: metrics.get(name, 0.0) for name in names}, data)


_ppo_loss, _value_loss = engine_workers.ppo_loss, losses.value_loss


def without_a_token(data: TensorDict) -> None:
    """TRUNCATED=masked may leave a mini-batch without a token: let its loss be 0, not 0 / 0."""
    if tensordict_utils.get_non_tensor_data(data=data, key="batch_num_tokens", default=None) == 0:
        tensordict_utils.assign_non_tensor(data, batch_num_tokens=1)


def value_loss(config, model_output: dict, data: TensorDict, dp_group=None):
    """verl's loss of the critic (workers/utils/losses.py), which trainer.py gives the workers."""
    without_a_token(data)
    return _value_loss(config, model_output, data, dp_group)


def _with_kl_of_a_token(config, model_output: dict, data: TensorDict, dp_group) -> tuple[torch.Tensor, dict]:
    """verl's loss; its metric of the KL is nats a token, whatever the loss's mode."""
    loss, metrics = _ppo_loss(config, model_output, data, dp_group)
    if config.use_kl_loss:
        batch = data.select("response_mask", "ref_log_prob").to_padded_tensor()
        log_probs = no_padding_2_padding(model_output["log_probs"].detach(), data)
        kl = kl_penalty(log_probs, batch["ref_log_prob"], config.kl_loss_type)
        total = agg_loss(kl, batch["response_mask"].bool(), "token-mean", **config.global_batch_info)
        metrics["kl_loss"] = Metric(AggregationType.SUM, total)
    return loss, metrics


def ppo_loss(config, model_output: dict, data: TensorDict, dp_group=None):
    """verl's loss (workers/utils/losses.py); in an ON_POLICY batch the model's own log-probs are the old ones."""
    without_a_token(data)
    if not tensordict_utils.get_non_tensor_data(data=data, key=ON_POLICY, default=False):
        loss, metrics = _with_kl_of_a_token(config, model_output, data, dp_group)
        return loss, metrics | parts({name: metrics[name].aggregate() for name in OF_RATIOS if name in metrics}, data)
    nested, entropy = model_output["log_probs"].detach(), model_output["entropy"].detach()
    log_probs, entropy = (no_padding_2_padding(values, data) for values in (nested, entropy))
    data["old_log_probs"] = response_from_nested(nested, data["response_mask"])
    found, cap = {}, tensordict_utils.get_non_tensor_data(data=data, key=CAP, default=0)
    if cap and data["response_mask"].values().any():  # as in ``measured``
        data["rollout_is_weights"], found = weighed(log_probs, data, cap)
    if config.entropy_coeff == 0:  # verl would take its gradient, times 0
        model_output = {name: value for name, value in model_output.items() if name != "entropy"}
    loss, metrics = _with_kl_of_a_token(config, model_output, data, dp_group)
    found |= measured(config, log_probs, entropy, data)
    return loss, metrics | of_the_batch(found, data, cap)


engine_workers.ppo_loss = ppo_loss
