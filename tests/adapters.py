"""LoRA adapters for tests, in peft's form."""

from pathlib import Path

LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def adapted(base: Path | str, spread: float = 0.2):
    """A PeftModel in float32 on ``base`` whose adapter changes what it says, the more so the larger its ``spread``."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype="float32"), LoraConfig(**LORA))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=spread)
    return model


def saved(base: Path | str, folder: Path, spread: float = 0.2) -> Path:
    """The adapter of ``adapted`` in ``folder``."""
    adapted(base, spread).save_pretrained(folder)
    return folder
