"""verl 0.9.1's loss of distillation with importance weights, and with a micro-batch in which no token counts.

trainer/distillation/losses.py:281 multiplies the loss, which is padded, by nested weights (ROLLOUT_CORRECTION); :118
takes the smallest loss of a micro-batch's tokens, of which TRUNCATED=masked may leave none. Test:
tests/test_verl_on_policy.py.
"""

import torch
from verl.trainer.distillation import losses
from verl.utils.metric import Metric

from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.on_policy import without_a_token

expect(
    losses.distillation_loss,
    'rollout_is_weights = data.get("rollout_is_weights", None)',
    "compute_distillation_loss_range(distillation_losses=distillation_losses, response_mask=response_mask)",
)
expect(losses.distillation_ppo_loss, "distillation_loss(config, distillation_config, model_output, data)")

_distillation_loss = losses.distillation_loss


def distillation_loss(config, distillation_config, model_output, data):
    """verl's with padded weights. Without a token that counts: 0, and as many metrics, which verl wants of each GPU."""
    without_a_token(data)
    weights, counted = data.get("rollout_is_weights", None), data["response_mask"]
    none = not counted.values().any()
    data = data.copy()  # its other users take nested weights, and this mask
    if weights is not None and weights.is_nested:
        data["rollout_is_weights"] = weights.to_padded_tensor(0.0)
    if none:
        data["response_mask"] = torch.ones_like(counted)
    loss, metrics = _distillation_loss(config, distillation_config, model_output, data)
    if not none:
        return loss, metrics
    zeros = {name: Metric(m.aggregation, 0.0) if isinstance(m, Metric) else 0.0 for name, m in metrics.items()}
    return loss * 0, zeros


losses.distillation_loss = distillation_loss
