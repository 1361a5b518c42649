"""verl_plugins/patches.py beside what it replaces."""

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict


@pytest.fixture(scope="module")
def patches():
    from tasks.common.verl_plugins import patches  # here: importing verl takes seconds

    return patches


def sequences(lengths: list[int], dtype=torch.int64) -> torch.Tensor:
    rows = [torch.randint(0, 100, (length,)).to(dtype) for length in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def test_micro_batches_are_those_of_verl(patches):
    torch.manual_seed(0)
    lengths = torch.randint(5, 60, (64,)).tolist()
    batch = TensorDict(
        {
            "input_ids": sequences(lengths),
            "old_log_probs": sequences(lengths, torch.float32),
            "temperature": torch.rand(64),
            "uid": NonTensorStack(*[NonTensorData(str(i)) for i in range(64)]),
            "max_token_len_per_gpu": NonTensorData(200),
        },
        batch_size=64,
    )
    ours, our_rows = patches.engine_utils.rearrange_micro_batches(batch, max_token_len=200)
    verls, verls_rows = patches._rearrange(batch, max_token_len=200)
    assert our_rows == verls_rows and len(ours) == len(verls) > 5
    assert sorted(row for rows in our_rows for row in rows) == list(range(64))
    for mine, its in zip(ours, verls, strict=True):
        assert set(mine.keys()) == set(its.keys())
        for name in ("input_ids", "old_log_probs"):
            assert torch.equal(mine[name].values(), its[name].values())
            assert torch.equal(mine[name].offsets(), its[name].offsets())
        assert torch.equal(mine["temperature"], its["temperature"])
        assert mine["uid"] == its["uid"] and mine["max_token_len_per_gpu"] == its["max_token_len_per_gpu"]


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
