"""What torch's varlen_attn computes (FlashAttention 2), for a CPU."""

from itertools import pairwise

import torch

LARGEST_HEAD = 256


def reference_kernel(query, key, value, offsets, _, longest, __, scale=None, window_size=(-1, -1)):
    """Causal attention inside each sequence.

    ``query``, ``key``, ``value``: (tokens, heads, size), the last two with as many or fewer heads; ``offsets``: where
    sequences begin, and the number of tokens; ``window_size``: tokens to the left that a token sees beside itself, -1
    for all. Raises RuntimeError for heads that FlashAttention 2 does not take.
    """
    sizes = {query.shape[-1], key.shape[-1], value.shape[-1]}
    if len(sizes) > 1 or max(sizes) > LARGEST_HEAD or max(sizes) % 8:
        limits = f"one size of queries, keys and values, a multiple of 8 up to {LARGEST_HEAD}"
        raise RuntimeError(f"FlashAttention 2 takes {limits}; these have {sorted(sizes)}")
    left, out = window_size[0], []
    for begin, end in pairwise(offsets.tolist()):
        rows = [x[begin:end].transpose(0, 1)[None] for x in (query, key, value)]
        ago = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        seen = (ago >= 0) & ((ago <= left) if left >= 0 else True)
        attend = torch.nn.functional.scaled_dot_product_attention
        out.append(attend(*rows, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)
