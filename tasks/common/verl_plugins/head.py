"""The output head stays in FSDP2's root unit, also where the embedding is another matrix than the head.

verl 0.9.1 gives such a head a unit of its own. FSDP2 gathers a unit around its own forward, but the fused kernel reads
``lm_head.weight`` outside it (verl/models/transformers/dense_common.py): a shard then meets a whole tensor, and the
step ends with "got mixed torch.Tensor and DTensor". The root unit stays gathered from its forward to its backward. On
two GPUs ``full_tensor()`` in its place would give the head half of its gradient.
"""

from verl.models.transformers import dense_common
from verl.utils import fsdp_utils

from verl_tasks.verl_plugins.expect import expect

HEAD = "lm_head"

expect(fsdp_utils._select_fsdp2_wrap_targets, '_wrap_by_name = set() if _tie else {"embed_tokens", "lm_head"}')
expect(fsdp_utils.apply_fsdp2, "modules = _select_fsdp2_wrap_targets(", "fully_shard(model, **fsdp_kwargs)")
expect(dense_common.forward_with_torch_backend, "vocab_weights=self.lm_head.weight")

_select_fsdp2_wrap_targets = fsdp_utils._select_fsdp2_wrap_targets


def without_head(model, names):
    """verl's units, without the head's."""
    heads = {id(module) for name, module in model.named_modules() if name.rpartition(".")[2] == HEAD}
    return [module for module in _select_fsdp2_wrap_targets(model, names) if id(module) not in heads]


fsdp_utils._select_fsdp2_wrap_targets = without_head
