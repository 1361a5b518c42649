"""What torch's varlen_attn and the two calls of varlen_once.py compute (FlashAttention 2), for a CPU."""

from itertools import pairwise

import torch

LARGEST_HEAD = 256


def reference_kernel(query, key, value, offsets, _, longest, __, scale=None, window_size=(-1, -1)):
    """Causal attention inside each sequence.

    ``query``, ``key``, ``value``: (tokens, heads, size), the last two with as many or fewer heads; ``offsets``: where
    sequences begin, and the number of tokens; ``window_size``: tokens to the left that a token sees beside itself, -1
    for all. Raises RuntimeError for heads that FlashAttention 2 does not take.
    """
    _check(query, key, value)
    left, out = window_size[0], []
    for begin, end in pairwise(offsets.tolist()):
        rows = [x[begin:end].transpose(0, 1)[None] for x in (query, key, value)]
        ago = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        seen = (ago >= 0) & ((ago <= left) if left >= 0 else True)
        attend = torch.nn.functional.scaled_dot_product_attention
        out.append(attend(*rows, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)


def _check(query, key, value) -> None:
    sizes = {query.shape[-1], key.shape[-1], value.shape[-1]}
    if len(sizes) > 1 or max(sizes) > LARGEST_HEAD or max(sizes) % 8:
        limits = f"one size of queries, keys and values, a multiple of 8 up to {LARGEST_HEAD}"
        raise RuntimeError(f"FlashAttention 2 takes {limits}; these have {sorted(sizes)}")


def reference_forward(query, key, value, offsets, key_offsets, longest, longest_key, causal, scale):
    """As varlen_once.flash_forward: the result (queries, heads, size) and its log-sum-exp (heads, queries)."""
    _check(query, key, value)
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[1], len(query), dtype=torch.promote_types(query.dtype, torch.float32))
    for mine, theirs in _segments(offsets, key_offsets, longest, longest_key):
        scores, values = _scores(query[mine], key[theirs], causal, scale), _by_head(value[theirs], query)
        lse[:, mine] = scores.logsumexp(-1)
        out[mine] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
    return out, lse


def reference_backward(
    gradient, query, key, value, out, lse, offsets, key_offsets, longest, longest_key, causal, scale
):
    """As varlen_once.flash_backward: the softmax of the scores is by the given ``lse``, whatever else was attended."""
    of_query, of_key, of_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value))
    by = query.shape[-1] ** -0.5 if scale is None else scale
    for mine, theirs in _segments(offsets, key_offsets, longest, longest_key):
        keys, values = (_by_head(x[theirs], query) for x in (key, value))
        queries, wanted, result = (x[mine].transpose(0, 1).to(lse.dtype) for x in (query, gradient, out))
        weights = (_scores(query[mine], key[theirs], causal, scale) - lse[:, mine, None]).exp()
        of_weights = wanted @ values.transpose(1, 2) - (wanted * result).sum(-1, keepdim=True)
        of_scores = weights * of_weights * by
        of_query[mine] = (of_scores @ keys).transpose(0, 1)
        for whole, each in (
            (of_key, of_scores.transpose(1, 2) @ queries),
            (of_value, weights.transpose(1, 2) @ wanted),
        ):
            whole[theirs] = each.unflatten(0, (key.shape[1], -1)).sum(1).transpose(0, 1)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _segments(offsets, key_offsets, longest: int, longest_key: int):
    """Slices of queries and of keys; the kernel reads no more of them than the lengths that it is told."""
    pairs = [[slice(*pair) for pair in pairwise(each.tolist())] for each in (offsets, key_offsets)]
    assert max(s.stop - s.start for s in pairs[0]) <= longest
    assert max(s.stop - s.start for s in pairs[1]) <= longest_key
    assert offsets.dtype == key_offsets.dtype == torch.int32
    return zip(*pairs, strict=True)


def _by_head(x, query):
    """(tokens, fewer heads, size) as (heads of ``query``, tokens, size), in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1).transpose(0, 1)


def _scores(query, key, causal: bool, scale: float | None):
    """(heads, queries, keys)"""
    scores = _by_head(query, query) @ _by_head(key, query).transpose(1, 2)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(ahead, -torch.inf) if causal else scores
