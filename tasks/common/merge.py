"""A LoRA checkpoint of verl as one folder that vLLM and transformers load: the adapter merged into its base."""

import shutil
import subprocess
import sys
from pathlib import Path


def is_lora(checkpoint: Path) -> bool:
    """Whether verl saved an adapter in ``checkpoint`` (the folder with the FSDP shards)."""
    return (checkpoint / "lora_train_meta.json").is_file()


def merge_lora(checkpoint: Path) -> Path:
    """Merge once and return ``checkpoint/merged``.

    verl's merger (verl/model_merger) joins the shards to a base model and an adapter, peft merges the two. Raises
    RuntimeError with the merger's last line if it fails.
    """
    merged = checkpoint / "merged"
    if merged.is_dir():
        return merged
    partial = checkpoint / ".merged.partial"
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    result = subprocess.run(
        [*command, "--local_dir", checkpoint, "--target_dir", partial], capture_output=True, text=True
    )
    if result.returncode:
        raise RuntimeError(f"{checkpoint}: verl.model_merger failed: {(result.stderr.splitlines() or [''])[-1]}")

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(partial, dtype="auto")
    model = PeftModel.from_pretrained(base, partial / "lora_adapter").merge_and_unload()
    model.save_pretrained(partial)
    partial.rename(merged)
    return merged
