"""What computing a prompt once has in common on a CPU (cpu/shared_prompts.py) and on GPUs (prompts_once.py)."""

from collections.abc import Callable
from itertools import pairwise

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_tasks.verl_plugins.expect import expect

expect(  # verl's way without padding, with and without a fused head
    FSDPEngineWithLMHead.prepare_model_outputs,
    "log_probs = output.log_probs.squeeze(0)  # (total_nnz,)",
    "logits_rmpad = output.logits.squeeze(0)  # (total_nnz, vocab_size)",
    'temperature_rmpad = output_args["temperature_rmpad"]',
    "labels=input_ids_rmpad_rolled,",
    "log_probs = torch.nested.nested_tensor_from_jagged(log_probs, cu_seqlens)",
)


def groups(prompts: torch.Tensor) -> list[list[int]]:
    """The rows of each prompt of ``prompts``, a nested tensor of ids; in the order of their first rows."""
    ids, offsets = prompts.values().tolist(), prompts.offsets().tolist()
    found: dict[tuple, list[int]] = {}
    for row, (begin, end) in enumerate(pairwise(offsets)):
        found.setdefault(tuple(ids[begin:end]), []).append(row)
    return [*found.values()]


def outputs(
    verls: Callable[[TensorDict], dict],
    micro_batch: TensorDict,
    labels: torch.Tensor,
    counts: torch.Tensor,
    sources: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """What ``verls``, its own way without padding, makes of a model's output for the tokens that are predicted alone.
    As nested as ``input_ids``, with 0 for the other tokens.

    ``labels``: (predicted,), the ids of these tokens; ``counts``: (sequences,), how many are of each; ``sources``:
    (predicted,), among the tokens of all sequences the ones before them.
    """
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    predicted = micro_batch.copy()
    predicted["input_ids"] = torch.nested.nested_tensor_from_jagged(labels, offsets)
    tensordict_utils.assign_non_tensor(predicted, use_remove_padding=True)
    found, whole = verls(predicted), micro_batch["input_ids"]
    for name, values in found.items():
        values = values.values()
        full = values.new_zeros(len(whole.values()), *values.shape[1:]).index_copy(0, sources, values)
        found[name] = torch.nested.nested_tensor_from_jagged(full, whole.offsets())
    return found
