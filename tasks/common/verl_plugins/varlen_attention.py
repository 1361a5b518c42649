"""Attention of packed sequences with torch's own FlashAttention kernel, as ``attn_implementation=varlen``.

There is no flash-attn wheel for torch 2.11, and sdpa cannot leave padding out: of sequences packed into one row
(verl's use_remove_padding) it computes the whole square. Loaded in every verl process by VERL_USE_EXTERNAL_MODULES
(stacks/current).

Where GPUs share sequences (SP, DeepSpeed-Ulysses, arXiv 2309.14509), each has a slice of the packed row. verl gathers
the row around FlashAttention only (verl/models/transformers/monkey_patch.py, _ulysses_flash_attention_forward); this
does the same around torch's kernel.
"""

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
)

_last: tuple[torch.Tensor, torch.Tensor, int] | None = None  # every layer of a forward asks for the same positions


def boundaries(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where packed sequences begin, and the length of the longest.

    Args:
        position_ids: (rows, tokens); 0 where a sequence begins, and in a row's padding. With SP the GPU's slice of
            the one row.

    Returns:
        int32 offsets of shape (sequences + 1,) into the flattened tokens of all slices, the last their number; the
        longest length.

    Raises ValueError where the tokens begin within a sequence.
    """
    global _last
    if _last is None or _last[0] is not position_ids:
        flat = _of_all_slices(position_ids).flatten()
        starts = (flat == 0).nonzero().flatten()
        offsets = torch.cat([starts, starts.new_tensor([flat.numel()])]).to(torch.int32)
        if offsets[0]:
            raise ValueError("attn_implementation=varlen: the first token is not the first of a sequence")
        _last = position_ids, offsets, int(offsets.diff().max())
    return _last[1], _last[2]


def _of_all_slices(position_ids: torch.Tensor) -> torch.Tensor:
    """(rows, tokens) of this GPU to (rows, tokens x SP)."""
    group, shared = get_ulysses_sequence_parallel_group(), get_ulysses_sequence_parallel_world_size()
    if shared == 1:
        return position_ids
    slices = [torch.empty_like(position_ids) for _ in range(shared)]
    torch.distributed.all_gather(slices, position_ids.contiguous(), group=group)
    return torch.cat(slices, dim=-1)


def varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each packed sequence; a function of transformers' AttentionInterface.

    ``query`` (rows, heads, tokens, size), ``key`` and ``value`` with as many or fewer heads; returns (rows, tokens,
    heads, size). With SP the tokens are a slice of the row; the kernel gets the whole row and its share of the heads.
    Raises ValueError for what it would compute otherwise than asked: a mask, a cache, dropout; the soft cap of Gemma 2,
    the sinks of gpt-oss.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError("attn_implementation=varlen: has no soft cap (Gemma 2) and no sinks (gpt-oss)")
    if attention_mask is not None or dropout or query.shape[2] != key.shape[2]:
        raise ValueError("attn_implementation=varlen: takes packed sequences, without a mask, a cache or dropout")
    shared = get_ulysses_sequence_parallel_world_size()
    if shared > 1:
        # No more copies than let each GPU have a head: the kernel repeats the rest itself.
        copies = max(shared // key.shape[1], 1)
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        query, key, value = (gather_seq_scatter_heads(x, seq_dim=2, head_dim=1) for x in (query, key, value))
    rows, heads, tokens, size = query.shape
    offsets, longest = boundaries(position_ids)
    packed = [x.transpose(1, 2).reshape(rows * tokens, -1, size) for x in (query, key, value)]
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    out = varlen_attn(*packed, offsets, offsets, longest, longest, scale=scaling, window_size=window)
    out = out.view(rows, tokens, heads, size)
    return (gather_heads_scatter_seq(out, seq_dim=1, head_dim=2) if shared > 1 else out), None


AttentionInterface.register("varlen", varlen)
