"""verl_plugins/prompts_once.py and varlen_once.py: a prompt stands once in a packed row, and what comes out is verl's.

With a reference of the GPU's kernel, in place of which torch's own operators stand on a GPU.
"""

from itertools import chain

import pytest
import torch

from tests.benchmarks.prompts_once import ROWS as BENCHMARKED
from tests.benchmarks.prompts_once import attention, positions, seen
from tests.helpers import by_torchrun

CASES = ("logits", "fused", "fused, no gradient of some", "fused, ratios", "fused, fixed", "fused, LoRA")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """Of two processes; of one, the pass is compared in test_parity.py."""
    return by_torchrun("tests.prompts_once", tmp_path_factory.mktemp("prompts_once"))


@pytest.mark.parametrize("case", CASES)
def test_log_probs_entropy_and_gradients_are_verls(case, found):
    for each in (process[case] for process in found):
        assert each["nested"] and max(each["values"], each["gradients"], each["loss"]) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_the_update_passes_fewer_tokens_where_micro_batches_are_ours(case, found):
    """As many passes on every GPU: FSDP waits for all of them."""
    passed = [process[case]["passed"] for process in found]
    for theirs, ours in passed:
        assert ours == theirs if "fixed" in case else sum(ours) < 0.85 * sum(theirs)
        assert "fixed" in case or max(ours) <= 40  # TOKENS
    assert len({len(ours) for _, ours in passed}) == 1


# ---- attention


@pytest.fixture
def once(monkeypatch):
    """The module, with the reference in place of the kernel; ``calls``: their queries, keys and heads."""
    from verl_tasks.verl_plugins import varlen_once
    from verl_tasks.verl_plugins.reference_attention import reference_backward, reference_forward

    monkeypatch.setattr(varlen_once, "flash_forward", reference_forward)
    monkeypatch.setattr(varlen_once, "flash_backward", reference_backward)
    return varlen_once


# Each row: of each prompt its length and those of its responses.
ROWS = {
    "two groups and a single one": [(3, [2, 4, 1]), (5, [3]), (1, [2, 2])],
    "one token each": [(1, [1, 1]), (1, [1, 1])],
    "the first response is empty": [(4, [0, 3, 2])],
    "long responses": [(2, [30, 1, 40])],
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_a_response_sees_its_prompt_and_itself(once, name, heads, scale):
    """Results and gradients are those of a mask, in float64."""
    row = ROWS[name]
    where, mask = positions(row), seen(row)
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> torch.Tensor:
        return torch.randn(1, count, where.shape[1], 16, dtype=torch.float64, generator=generator)

    inputs = [drawn(heads[0]), drawn(heads[1]), drawn(heads[1])]
    wanted = drawn(heads[0]).transpose(1, 2)

    def ours(query, key, value):
        return once.varlen_once(None, query, key, value, None, position_ids=where, scaling=scale)[0]

    def by_mask(query, key, value):
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)

    results = []
    for function in (ours, by_mask):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad((out * wanted).sum(), leaves)])
    for mine, right in zip(*results, strict=True):
        assert mine.shape == right.shape and torch.allclose(mine, right, atol=1e-10)


def test_gradient_checkpointing_computes_it_again(once):
    where = positions(ROWS["two groups and a single one"])
    inputs = [torch.randn(1, 2, where.shape[1], 8, dtype=torch.float64) for _ in range(3)]

    def attention(*given):
        return once.varlen_once(None, *given, None, position_ids=where)[0].square().sum()

    results = []
    for checkpointed in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        checkpoint = torch.utils.checkpoint.checkpoint
        out = checkpoint(attention, *leaves, use_reentrant=False) if checkpointed else attention(*leaves)
        results.append(torch.autograd.grad(out, leaves))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_layout_of_a_row(once):
    where = once.layout(positions(ROWS["two groups and a single one"]))
    assert where.offsets.tolist() == [0, 5, 9, 10, 18, 21, 23] and where.longest == 8
    assert where.later.tolist() == [5, 6, 7, 8, 9, 21, 22] and where.later_offsets.tolist() == [0, 5, 7]
    assert where.seen.tolist() == [0, 1, 2, 18] and where.seen_offsets.tolist() == [0, 3, 4]
    assert (where.longest_later, where.longest_seen) == (5, 3)
    assert where.offsets.dtype == where.later_offsets.dtype == where.seen_offsets.dtype == torch.int32
    assert once.layout(positions([(3, [2]), (1, [4])])) is None


@pytest.mark.parametrize("wrong", [[3, 4, 0, 1], [0, 1, 2, 4], [0, 1, 2, 2, 1]])
def test_a_response_without_its_prompt_is_refused(once, wrong):
    with pytest.raises(ValueError, match="without its prompt"):
        once.layout(torch.tensor([wrong]))


@pytest.mark.parametrize("asked", [{"dropout": 0.1}, {"sliding_window": 4}])
def test_what_the_kernel_would_leave_out_is_refused(once, asked):
    where = positions(ROWS["two groups and a single one"])
    inputs = [torch.randn(1, 2, where.shape[1], 8) for _ in range(3)]
    with pytest.raises(ValueError, match="no dropout and no window"):
        once.varlen_once(None, *inputs, None, position_ids=where, **asked)


def test_the_calls_fit_the_operators_of_torch(monkeypatch):
    """Shapes, names and order of arguments, by torch's own description of its kernel: nothing is computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from verl_tasks.verl_plugins import varlen_once

    row = ROWS["two groups and a single one"]
    where, heads = varlen_once.layout(positions(row)), (4, 2, 2)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        where = varlen_once.Layout(*(mode.from_tensor(x) if hasattr(x, "dtype") else x for x in vars(where).values()))
        count = len(positions(row)[0])
        query, key, value = (torch.empty(count, n, 16, dtype=torch.bfloat16, requires_grad=True) for n in heads)
        out = varlen_once.Once.apply(query, key, value, where, None)
        gradients = torch.autograd.grad(out.sum(), (query, key, value))
    assert out.shape == query.shape
    assert [g.shape for g in gradients] == [query.shape, key.shape, value.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("row", BENCHMARKED)
def test_the_kernel_is_as_near_to_float32_as_a_mask_is(row):
    found = attention(BENCHMARKED[row], "cuda", torch.bfloat16)
    assert max(found.values()) <= 3 * found["sdpa"]  # 2.7 on an H200


# ---- micro-batches and rows


@pytest.fixture(scope="module")
def engine():
    from verl_tasks.verl_plugins import prompts_once

    return prompts_once


def test_rows_of_a_prompt_fill_a_micro_batch(engine):
    prompts, shared = [[0, 2, 4], [1, 3], [5]], [10, 5, 10, 5, 10, 1]
    own = [4, 3, 6, 3, 2, 1]
    assert engine.filled(prompts, shared, own, 100) == [[2, 0, 4, 1, 3, 5]]
    for most in (16, 17, 20, 24, 33):
        made = engine.filled(prompts, shared, own, most)
        assert sorted(chain(*made)) == [*range(6)]
        for rows in made:
            held = {n for n, group in enumerate(prompts) if {*group} & {*rows}}
            assert sum(own[row] for row in rows) + sum(shared[prompts[n][0]] for n in held) <= most


def test_a_row_longer_than_a_pass_stands_alone(engine):
    assert engine.filled([[0, 1]], [5, 5], [30, 2], 20) == [[0], [1]]


def test_a_gpu_with_fewer_micro_batches_halves_its_own(engine):
    made = engine.split([[0, 1, 2, 3], [4]], 4)
    assert len(made) == 4 and all(made) and sorted(chain(*made)) == [*range(5)]
    assert engine.split([[0], [1]], 2) == [[0], [1]]
    with pytest.raises(ValueError, match="3 micro-batches of 2 rows"):
        engine.split([[0], [1]], 3)


def test_the_row_of_a_micro_batch(engine):
    """Two prompts of two tokens, the first of rows 0 and 2, and one whose response is empty."""
    packed = engine.pack([[0, 2], [1], [3]], [2, 2, 2, 1], [4, 3, 5, 1])
    # The batch's tokens: 0-3 of row 0, 4-6 of row 1, 7-11 of row 2, 12 of row 3.
    assert packed.tokens.tolist() == [0, 1, 2, 3, 9, 10, 11, 4, 5, 6, 12]
    assert packed.sources.tolist() == [1, 2, 5, 8, 9, 10, 12]
    assert packed.places.tolist() == [1, 2, 8, 1, 4, 5, 10]
    assert packed.counts.tolist() == [2, 1, 3, 1]


def test_something_is_predicted_of_empty_responses_alone(engine):
    packed = engine.pack([[0, 2], [1]], [2, 3, 2], [2, 3, 2])
    assert packed.tokens.tolist() == [0, 1, 2, 3, 4]
    assert packed.sources.tolist() == [1, 4, 6] and packed.places.tolist() == [1, 4, 1]
