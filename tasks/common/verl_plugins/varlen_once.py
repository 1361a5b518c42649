"""Attention of packed sequences of which several share a prompt that stands once: ``attn_implementation=varlen_once``.

A row is made of segments, and positions say which. One that begins at position 0 is a prompt with its first response,
or any sequence. One that begins at P > 0 is another response to the same prompt: it sees the first P tokens of that
sequence, and itself. So the kernel is called twice: each segment causal, and the other responses of a prompt, as one
sequence of queries, with the prompt's keys. Their results are merged by their log-sum-exp, as ring attention does
(arXiv 2310.01889). The backward kernel, given the merged result and log-sum-exp, has the gradient of each call's part.
"""

from dataclasses import dataclass

import torch
from transformers import AttentionInterface
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size

from verl_tasks.machine.memory import PROMPTS_ONCE
from verl_tasks.verl_plugins.varlen_attention import varlen


@dataclass(frozen=True)
class Layout:
    """Where a row's segments are, and which tokens see a prompt that is not in their own segment."""

    offsets: torch.Tensor  # (segments + 1,), int32: where they begin, and the number of tokens
    longest: int
    later: torch.Tensor  # (queries,), int64: the tokens of responses after a prompt's first
    later_offsets: torch.Tensor  # (prompts + 1,), int32, into ``later``
    longest_later: int
    seen: torch.Tensor  # (keys,), int64: the tokens of the prompts that they see
    seen_offsets: torch.Tensor  # (prompts + 1,), int32, into ``seen``
    longest_seen: int


_last: tuple[torch.Tensor, Layout | None] | None = None  # every layer of a forward asks for the same positions


def layout(position_ids: torch.Tensor) -> Layout | None:
    """The layout of a row with ``position_ids`` (1, tokens); None where no prompt is shared.

    Raises ValueError where a response has no prompt before it.
    """
    global _last
    if _last is None or _last[0] is not position_ids:
        _last = position_ids, _layout(position_ids.flatten())
    return _last[1]


def _layout(positions: torch.Tensor) -> Layout | None:
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[1:] = positions[1:] != positions[:-1] + 1
    places = begins.nonzero().flatten()
    starts, lengths = torch.stack([places, positions[places]]).tolist()
    ends = [*starts[1:], len(positions)]
    shared: dict[int, tuple[int, int, int]] = {}  # by where a prompt begins: its length, where its responses are
    first = None
    for start, end, prompt in zip(starts, ends, lengths, strict=True):
        if prompt == 0:
            first, whole = start, end - start
            continue
        length, begin, _ = shared.get(first, (prompt, start, 0))
        if first is None or length != prompt or prompt > whole:
            raise ValueError(f"attn_implementation={PROMPTS_ONCE}: a response without its prompt before it")
        shared[first] = prompt, begin, end
    if not shared:
        return None
    device = positions.device

    def tokens(runs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The tokens of ``runs``, their offsets, and the length of the longest."""
        counts = [end - begin for begin, end in runs]
        index = torch.cat([torch.arange(*run) for run in runs])
        return index.to(device), _offsets(counts).to(device), max(counts)

    later = tokens([(begin, end) for _, begin, end in shared.values()])
    seen = tokens([(start, start + prompt) for start, (prompt, _, _) in shared.items()])
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    return Layout(_offsets(counts).to(device), max(counts), *later, *seen)


def _offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def flash_forward(query, key, value, offsets, key_offsets, longest, longest_key, causal, scale):
    """torch's FlashAttention: the result (queries, heads, size), and its log-sum-exp (heads, queries) in float32.

    ``query``, ``key``, ``value``: (tokens, heads, size), the last two with as many or fewer heads; offsets: int32.
    """
    window = {"window_size_left": -1, "window_size_right": 0 if causal else -1}
    lengths = (offsets, key_offsets, longest, longest_key)
    # No dropout, and no mask to look at.
    given = (query, key, value, *lengths, 0.0, causal, False)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*given, scale=scale, **window)
    return out, lse


def flash_backward(gradient, query, key, value, out, lse, offsets, key_offsets, longest, longest_key, causal, scale):
    """The gradients of ``query``, ``key`` and ``value``, in their shapes, of these keys' part of ``out``."""
    window = {"window_size_left": -1, "window_size_right": 0 if causal else -1}
    lengths = (offsets, key_offsets, longest, longest_key)
    # Without dropout the kernel reads no random state (torch/nn/attention/varlen.py gives it the same).
    state, unused = query.new_zeros(2, dtype=torch.uint64), query.new_empty(0)
    given = (gradient, query, key, value, out, lse, *lengths, 0.0, causal, state, unused)
    return torch.ops.aten._flash_attention_backward(*given, scale=scale, **window)


class Once(torch.autograd.Function):
    """Attention of a row by its ``Layout``; ``query``, ``key``, ``value``: (tokens, heads, size)."""

    @staticmethod
    def forward(ctx, query, key, value, where: Layout, scale: float | None):
        own, of_prompts = _calls(where, scale)
        out, lse = flash_forward(query, key, value, *own)
        later, seen = where.later, where.seen
        beside, beside_lse = flash_forward(query[later], key[seen], value[seen], *of_prompts)
        alone_lse = lse[:, later]
        share = torch.sigmoid(beside_lse - alone_lse).T.unsqueeze(-1)  # (queries, heads, 1): of the prompt's keys
        merged = torch.lerp(out[later].to(share.dtype), beside.to(share.dtype), share)
        out[later] = merged.to(out.dtype)
        lse[:, later] = torch.logaddexp(alone_lse, beside_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.where, ctx.scale = where, scale
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, out, lse = ctx.saved_tensors
        own, of_prompts = _calls(ctx.where, ctx.scale)
        later, seen = ctx.where.later, ctx.where.seen
        gradient = gradient.contiguous()
        of_query, of_key, of_value = flash_backward(gradient, query, key, value, out, lse, *own)
        some = (gradient[later], query[later], key[seen], value[seen], out[later], lse[:, later].contiguous())
        more_query, more_key, more_value = flash_backward(*some, *of_prompts)
        for whole, index, more in (
            (of_query, later, more_query),
            (of_key, seen, more_key),
            (of_value, seen, more_value),
        ):
            whole[index] += more  # an index has no token twice
        return of_query, of_key, of_value, None, None


def _calls(where: Layout, scale: float | None) -> tuple[tuple, tuple]:
    """What the kernel is told: of each segment with itself, and of responses with their prompt."""
    own = (where.offsets, where.offsets, where.longest, where.longest, True, scale)
    # Of one query for each prompt the kernel would lay out its log-sum-exp otherwise; a larger bound is right too.
    longest = max(where.longest_later, 2)
    of_prompts = (where.later_offsets, where.seen_offsets, longest, where.longest_seen, False, scale)
    return own, of_prompts


def varlen_once(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor,
    scaling: float | None = None,
    **others,
) -> tuple[torch.Tensor, None]:
    """As ``varlen`` (varlen_attention.py), which computes the rows without a shared prompt, and says what it refuses.

    prompts_once.py makes the others, of plain models alone. Raises ValueError for a mask, dropout or a window.
    """
    whole = len(query) == get_ulysses_sequence_parallel_world_size() == 1  # neither padded rows nor slices of one
    where = layout(position_ids) if whole else None
    if where is None:
        given = {"position_ids": position_ids, "scaling": scaling} | others
        return varlen(module, query, key, value, attention_mask, **given)
    if attention_mask is not None or others.get("dropout") or others.get("sliding_window") is not None:
        raise ValueError(f"attn_implementation={PROMPTS_ONCE}: takes no mask, no dropout and no window")
    out = Once.apply(*(x[0].transpose(0, 1) for x in (query, key, value)), where, scaling)
    return out[None], None


AttentionInterface.register(PROMPTS_ONCE, varlen_once)
