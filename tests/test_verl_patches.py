"""verl_plugins/patches.py beside what it replaces."""

import pytest
import torch


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
