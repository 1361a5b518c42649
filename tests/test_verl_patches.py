"""verl_plugins/patches.py and nested.py beside what they replace: verl's own functions."""

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict


@pytest.fixture(scope="module")
def patches():
    from verl_tasks.verl_plugins import patches  # here: importing verl takes seconds

    return patches


# ---- what is drawn follows SEED


class Built(Exception):
    """Carries the module, before FSDP wraps it."""


def drawn(monkeypatch, seed: int, before: int) -> torch.Tensor:
    """LoRA's A of verl's engine with SEED, where ``before`` was the state of torch's random numbers."""
    from types import SimpleNamespace

    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    class Engine(FSDPEngine):
        def _build_module(self):
            shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
            return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2))

        def _build_lora_module(self, module):
            raise Built(super()._build_lora_module(module))

    engine = object.__new__(Engine)
    names = ("target_parameters", "exclude_modules", "lora_adapter_path")
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    engine._is_lora, engine.model_config = True, SimpleNamespace(**lora, **dict.fromkeys(names))
    monkeypatch.setenv("SEED", str(seed))
    torch.manual_seed(before)
    with pytest.raises(Built) as built:
        engine._build_model_optimizer()
    return next(p for name, p in built.value.args[0].named_parameters() if "lora_A" in name)


def test_loras_first_weights_follow_the_seed_whatever_was_drawn_before(patches, monkeypatch):
    first = drawn(monkeypatch, seed=5, before=1)
    assert torch.equal(first, drawn(monkeypatch, seed=5, before=2))
    assert not torch.equal(first, drawn(monkeypatch, seed=6, before=1))


# ---- what is exported loads everywhere


def test_a_trained_models_config_does_not_name_the_attention_of_the_training(patches, small_model, tmp_path):
    from transformers import AutoConfig
    from verl.workers.config import HFModelConfig

    override = {"attn_implementation": "eager", "initializer_range": 0.03}
    config = HFModelConfig(path=str(small_model), override_config=override).hf_config
    assert (config._attn_implementation, config.initializer_range) == ("eager", 0.03)
    config.save_pretrained(tmp_path)  # as verl's checkpoint manager does
    assert "attn" not in (tmp_path / "config.json").read_text()
    assert AutoConfig.from_pretrained(tmp_path)._attn_implementation is None  # transformers' own default


# ---- nested.py: rows of nested tensors


LENGTHS = [3, 0, 5, 1, 0, 7, 2, 4]
MANY = torch.randint(0, 60, (64,), generator=torch.Generator().manual_seed(0)).tolist()
ROWS = {
    "one": [2],
    "empty": [1],
    "last": [-1],
    "permuted": [7, 0, 3, 5, 1, 2, 6, 4],
    "repeated": [2, 2, 1, 0, 2],
    "tensor": torch.tensor([6, 1, 3]),
    "as a loader gives them": list(torch.tensor([4, 5, 1])),
}


@pytest.fixture(scope="module")
def nested():
    from verl_tasks.verl_plugins import nested, patches  # noqa: F401  (here: importing verl takes seconds)

    return nested


def jagged(lengths: list[int], *more: int, dtype=torch.float32) -> torch.Tensor:
    rows = [(100 * torch.randn(length, *more)).to(dtype) for length in lengths]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)


def batch_of(lengths: list[int]) -> TensorDict:
    torch.manual_seed(0)
    count, offsets = len(lengths), torch.tensor([0, *lengths]).cumsum(0)
    position_ids = torch.nested.nested_tensor_from_jagged(torch.randn(4, sum(lengths)), offsets)
    position_ids._ragged_idx = 2  # as maybe_fix_3d_position_ids leaves those of models that see
    return TensorDict(
        {
            "input_ids": jagged(lengths, dtype=torch.int64),
            "old_log_probs": jagged(lengths),
            "half": jagged(lengths, dtype=torch.bfloat16),
            "teacher_logprobs": jagged(lengths, 2),
            "position_ids": position_ids,
            "temperature": torch.rand(count),
            "dense": torch.rand(count, 3),
            "uid": NonTensorStack(*[NonTensorData(str(row)) for row in range(count)]),
            "max_token_len_per_gpu": NonTensorData(200),
        },
        batch_size=count,
    )


def assert_same(ours, verls) -> None:
    assert type(ours) is type(verls)
    if not isinstance(ours, torch.Tensor):
        assert ours == verls
    elif not verls.is_nested:
        assert ours.dtype == verls.dtype and torch.equal(ours, verls)
    else:
        assert ours.dtype == verls.dtype and ours.dim() == verls.dim() and ours._ragged_idx == verls._ragged_idx
        assert ours.offsets().dtype == verls.offsets().dtype and torch.equal(ours.offsets(), verls.offsets())
        assert torch.equal(ours.values(), verls.values())
        rows = zip(ours.unbind(), verls.unbind(), strict=True)
        assert all(torch.equal(mine, its) for mine, its in rows)


def assert_same_rows(ours: TensorDict, verls: TensorDict) -> None:
    from verl.utils import tensordict_utils

    names = set(verls.keys())
    assert set(ours.keys()) == names and ours.batch_size == verls.batch_size
    for name in names:
        assert type(ours.get(name)) is type(verls.get(name))
        assert_same(tensordict_utils.get(ours, name), tensordict_utils.get(verls, name))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_selected_rows_are_those_of_verl(nested, rows):
    batch = batch_of(LENGTHS)
    assert_same_rows(nested.index_select_tensor_dict(batch, rows), nested._index_select(batch, rows))


def test_rows_of_a_batch_of_one_and_of_one_that_has_nothing_nested(nested):
    for batch in (batch_of([3]), batch_of([0]), batch_of(LENGTHS).select("temperature", "uid")):
        assert_same_rows(nested.index_select_tensor_dict(batch, [0, 0]), nested._index_select(batch, [0, 0]))
    assert nested.index_select_tensor_dict(None, [0]) is None
    with pytest.raises(IndexError):
        nested.index_select_tensor_dict(batch_of(LENGTHS), [len(LENGTHS)])


def test_rows_that_are_not_packed_are_taken_as_verl_takes_them(nested):
    starts, lengths = torch.tensor([0, 1, 0]), torch.tensor([2, 3, 1])
    narrowed = torch.nested.narrow(torch.randn(3, 5), 1, starts, lengths, layout=torch.jagged)
    batch = TensorDict({"narrowed": narrowed}, batch_size=3)
    assert_same_rows(nested.index_select_tensor_dict(batch, [2, 1]), nested._index_select(batch, [2, 1]))


def mini_and_micro_batches(nested):
    batch = batch_of(MANY).exclude("position_ids")
    chosen = nested.tensordict_utils.make_iterator(batch, 16, epochs=1, seed=3, dataloader_kwargs={"shuffle": True})
    micro, rows = nested.seqlen_balancing.rearrange_micro_batches(batch, max_token_len=200)
    assert sorted(row for part in rows for row in part) == list(range(len(MANY)))
    return [*chosen, *micro]


def test_mini_and_micro_batches_are_those_of_verl_and_no_row_becomes_a_tensor(nested, monkeypatch):
    unbind = torch.Tensor.unbind

    def not_of_rows(tensor, dim=0):
        assert not tensor.is_nested, "a tensor for each row"
        return unbind(tensor, dim)

    with monkeypatch.context() as forbidden:
        forbidden.setattr(torch.Tensor, "unbind", not_of_rows)
        ours = mini_and_micro_batches(nested)
    monkeypatch.setattr(nested.tensordict_utils, "index_select_tensor_dict", nested._index_select)
    verls = mini_and_micro_batches(nested)
    assert len(ours) == len(verls) > 4 + 5
    for mine, its in zip(ours, verls, strict=True):
        assert_same_rows(mine, its)


# ---- what the loss takes of the model's output


def data_of(prompts: list[int], responses: list[int], **more) -> TensorDict:
    data = {"prompts": jagged(prompts, dtype=torch.int64), "responses": jagged(responses, dtype=torch.int64)}
    return TensorDict(data | {name: NonTensorData(value) for name, value in more.items()}, batch_size=len(prompts))


def with_gradient(function, values: torch.Tensor, *args) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``function`` makes of ``values``, and the gradient of a loss that weighs each number of it differently."""
    leaf = values.detach().requires_grad_()
    found = function(leaf, *args)
    flat = found.values() if found.is_nested else found
    (flat * torch.arange(1, flat.numel() + 1).view(flat.shape)).sum().backward()
    return found.detach(), leaf.grad


PROMPTS = [2, 1, 4, 3, 1, 1, 9, 2]
CASES = {"some": (PROMPTS, LENGTHS), "one": ([2], [5]), "empty": ([2, 3], [0, 0]), "many": ([1] * 64, MANY)}


@pytest.mark.parametrize("more", [(), (3,)], ids=["numbers", "vectors"])
@pytest.mark.parametrize("prompts, responses", CASES.values(), ids=CASES.keys())
def test_what_responses_get_of_the_models_output_is_what_verl_takes(nested, prompts, responses, more):
    torch.manual_seed(0)
    offsets = torch.tensor([0, *map(sum, zip(prompts, responses, strict=True))]).cumsum(0)
    values = torch.randn(offsets[-1], *more)
    for known in ({}, {"max_response_len": max(responses) + 2}, {"max_response_len": max(responses) // 2}):
        data = data_of(prompts, responses, **known)
        verls = with_gradient(nested._no_padding_2_padding, values, data)
        for ours, its in zip(with_gradient(nested.padding.no_padding_2_padding, values, data), verls, strict=True):
            assert_same(ours, its)
    output = torch.nested.nested_tensor_from_jagged(values, offsets)
    assert_same(nested.no_padding_2_padding(output, data), nested._no_padding_2_padding(output, data))

    def of_nested(function):
        return lambda leaf: function(torch.nested.nested_tensor_from_jagged(leaf, offsets), data["responses"])

    verls = with_gradient(of_nested(nested._response_from_nested), values)
    for ours, its in zip(with_gradient(of_nested(nested.response_from_nested), values), verls, strict=True):
        assert_same(ours, its)


@pytest.mark.parametrize("more", [(), (3,)], ids=["numbers", "vectors"])
@pytest.mark.parametrize("lengths", [LENGTHS, [5], [0, 3], MANY], ids=["some", "one", "empty", "many"])
def test_responses_without_their_padding_are_those_of_verl(nested, lengths, more):
    torch.manual_seed(0)
    for width in (max(lengths) + 2, max(lengths), max(lengths) - 2):
        padded, mask = torch.randn(len(lengths), width, *more), jagged(lengths)
        verls = with_gradient(nested._response_to_nested, padded, mask)
        for ours, its in zip(with_gradient(nested.padding.response_to_nested, padded, mask), verls, strict=True):
            assert_same(ours, its)


def test_padded_prompts_are_left_to_verl(nested):
    values = torch.randn(7)
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 0]])
    data = TensorDict({"prompts": mask[:, :2], "responses": mask[:, 2:], "attention_mask": mask}, batch_size=2)
    assert_same(nested.no_padding_2_padding(values, data), nested._no_padding_2_padding(values, data))


@pytest.mark.parametrize("prompts, tokens", [([2, 3], 11), ([0, 5], 10)], ids=["another total", "no prompt"])
def test_lengths_that_cannot_be_are_refused_as_by_verl(nested, prompts, tokens):
    data = data_of(prompts, [1, 4])
    for function in (nested._no_padding_2_padding, nested.no_padding_2_padding):
        with pytest.raises(AssertionError):
            function(torch.randn(tokens), data)


def test_verls_losses_and_ours_use_it(nested):
    from verl_tasks.verl_plugins import on_policy

    users = (nested.losses, nested.distillation, on_policy)
    assert {user.no_padding_2_padding for user in users} == {nested.no_padding_2_padding}
    assert nested.no_padding_2_padding is not nested._no_padding_2_padding
    assert on_policy.response_from_nested is nested.response_from_nested is not nested._response_from_nested
