"""Attention of packed sequences with torch's own FlashAttention kernel, as ``attn_implementation=varlen``.

There is no flash-attn wheel for torch 2.11, and sdpa cannot leave padding out: of sequences packed into one row
(verl's use_remove_padding) it computes the whole square. Loaded in every verl process by VERL_USE_EXTERNAL_MODULES
(stacks/current).
"""

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

_last: tuple[torch.Tensor, torch.Tensor, int] | None = None  # every layer of a forward asks for the same positions


def boundaries(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where packed sequences begin, and the length of the longest.

    Args:
        position_ids: (rows, tokens); 0 where a sequence begins, and in a row's padding.

    Returns:
        int32 offsets of shape (sequences + 1,) into the flattened tokens, the last their number; the longest length.
    """
    global _last
    if _last is None or _last[0] is not position_ids:
        flat = position_ids.flatten()
        starts = (flat == 0).nonzero().flatten()
        offsets = torch.cat([starts, starts.new_tensor([flat.numel()])]).to(torch.int32)
        _last = position_ids, offsets, int(offsets.diff().max())
    return _last[1], _last[2]


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
    **_,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each packed sequence; a function of transformers' AttentionInterface.

    ``query`` (rows, heads, tokens, size), ``key`` and ``value`` with as many or fewer heads; returns (rows, tokens,
    heads, size). Raises ValueError for what it would compute otherwise than asked: a mask, a cache, dropout.
    """
    if attention_mask is not None or dropout or query.shape[2] != key.shape[2]:
        raise ValueError("attn_implementation=varlen: takes packed sequences, without a mask, a cache or dropout")
    rows, heads, tokens, size = query.shape
    offsets, longest = boundaries(position_ids)
    packed = [x.transpose(1, 2).reshape(rows * tokens, -1, size) for x in (query, key, value)]
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    out = varlen_attn(*packed, offsets, offsets, longest, longest, scale=scaling, window_size=window)
    return out.view(rows, tokens, heads, size), None


AttentionInterface.register("varlen", varlen)
