"""Rows of nested tensors by their offsets, with verl 0.9.1, which makes a tensor of each row.

The results are verl's. Of 1,024 rows in eight mini-batches verl made 100,000 tensors, and its loss asked for lengths
row by row, which waits for a GPU. patches.py loads this in every verl process, before what uses it.
"""

import torch
from tensordict import TensorDict
from verl.trainer.distillation import losses as distillation
from verl.utils import seqlen_balancing, tensordict_utils
from verl.workers.utils import losses, padding

from verl_tasks.verl_plugins.expect import expect

expect(tensordict_utils.index_select_tensor_dict, "tensor_lst = tensor.unbind()", "nested_tensor_from_tensor_list(")
expect(tensordict_utils.make_iterator, "yield index_select_tensor_dict(tensordict, idx)")
expect(seqlen_balancing.rearrange_micro_batches, "tu.index_select_tensor_dict(batch, partition)")
expect(
    padding.no_padding_2_padding,
    "F.pad(values[seq_offset - resp_len - 1 : seq_offset - 1], (*skip_padding, 0, pad_size))",
    "sequence_lens = prompt_lens + response_lens",
)
expect(padding.response_from_nested, "response_list.append(values[seq_offset - resp_len - 1 : seq_offset - 1])")
expect(padding.response_to_nested, "response_list.append(tensor[i, : response_lens[i]])")

_index_select = tensordict_utils.index_select_tensor_dict
_no_padding_2_padding = padding.no_padding_2_padding
_response_from_nested, _response_to_nested = padding.response_from_nested, padding.response_to_nested


def _jagged(values: torch.Tensor, lengths: torch.Tensor, counts: list[int], ragged: int = 1) -> torch.Tensor:
    """The nested tensor of ``values`` with rows of ``lengths``; ``counts``: the same as a list."""
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    nested = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=min(counts), max_seqlen=max(counts))
    nested._ragged_idx = ragged  # as verl's nested_tensor_from_tensor_list
    return nested


def _rows(values: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, ragged: int = 1) -> torch.Tensor:
    """Nested rows of ``values``: row i is ``lengths[i]`` entries from ``starts[i]`` on, along dimension ragged - 1."""
    counts = lengths.tolist()  # the only time that a GPU is waited for
    total = sum(counts)
    shifts = starts - (lengths.cumsum(0) - lengths)
    index = torch.arange(total, device=values.device) + shifts.repeat_interleave(lengths, output_size=total)
    return _jagged(values.index_select(ragged - 1, index), lengths, counts, ragged)


def index_select_tensor_dict(batch: TensorDict | None, indices: torch.Tensor | list[int]) -> TensorDict | None:
    """As verl's (utils/tensordict_utils.py): the rows ``indices`` of ``batch``, for mini-batches and micro-batches."""
    tensors = {} if batch is None else {k: v for k, v in batch.items() if isinstance(v, torch.Tensor) and v.is_nested}
    nested = {k: v for k, v in tensors.items() if v.layout == torch.jagged and v.lengths() is None}
    if not nested:
        return _index_select(batch, indices)
    indices = torch.as_tensor(indices)
    selected = _index_select(batch.exclude(*nested), indices)
    for name, tensor in nested.items():
        offsets = tensor.offsets()
        starts, lengths = offsets[:-1][indices], offsets.diff()[indices]
        selected[name] = _rows(tensor.values(), starts, lengths, tensor._ragged_idx)
    return selected


def no_padding_2_padding(tensor: torch.Tensor, data: TensorDict) -> torch.Tensor:
    """As verl's (workers/utils/padding.py): of the model's output for all tokens, that for responses, padded with 0.

    Shape (responses, tokens, ...). Of a token the model's output is at the token before it.
    """
    if not data["prompts"].is_nested:
        return _no_padding_2_padding(tensor, data)
    values = tensor.values() if tensor.is_nested else tensor
    prompts, lengths = (data[name].offsets().diff().to(values.device) for name in ("prompts", "responses"))
    longest = tensordict_utils.get_non_tensor_data(data=data, key="max_response_len", default=-1)
    ends = (prompts + lengths).cumsum(0)
    last, shortest, longest_here = torch.stack([ends[-1], prompts.min(), lengths.max()]).tolist()
    assert last == values.shape[0] and shortest > 0, f"{last} tokens of {values.shape[0]}, prompts of {shortest}"
    places = torch.arange(longest_here if longest < 0 else longest, device=values.device)
    kept = places < lengths.unsqueeze(1)
    index = ((ends - lengths - 1).unsqueeze(1) + places)[kept]
    padded = values.new_zeros(*kept.shape, *values.shape[1:])
    padded[kept] = values.index_select(0, index)
    return padded


def response_from_nested(tensor: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """As verl's (workers/utils/padding.py): the same as no_padding_2_padding, nested."""
    lengths = response_mask.offsets().diff().to(tensor.device)
    return _rows(tensor.values(), tensor.offsets()[1:] - lengths - 1, lengths)


def response_to_nested(tensor: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """As verl's (workers/utils/padding.py): the padded rows of ``tensor`` without their padding."""
    assert response_mask.is_nested
    lengths = response_mask.offsets().diff().to(tensor.device).clamp(max=tensor.shape[1])
    kept = torch.arange(tensor.shape[1], device=tensor.device) < lengths.unsqueeze(1)
    return _jagged(tensor[kept], lengths, lengths.tolist())


tensordict_utils.index_select_tensor_dict = index_select_tensor_dict
for _user in (padding, losses, distillation):
    _user.no_padding_2_padding = no_padding_2_padding
padding.response_from_nested, padding.response_to_nested = response_from_nested, response_to_nested
