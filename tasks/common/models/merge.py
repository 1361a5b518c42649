"""One folder that vLLM and transformers load: from a checkpoint of verl or of DPO, or from an adapter and its base."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tasks.common.process import StageFailed
from tasks.common.settings import SettingsError


def has_weights(folder: Path) -> bool:
    """Whether ``folder`` is a whole model in transformers' form."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def is_adapter(folder: Path) -> bool:
    """Whether ``folder`` is a LoRA adapter in peft's form."""
    return (folder / "adapter_config.json").is_file()


def merged_folder(checkpoint: Path) -> Path | None:
    """The loadable folder of ``checkpoint`` if there is one already. ``checkpoint`` is the folder with verl's FSDP
    shards, or one of DPO (tasks/common/training/trl_dpo.py), which has the model or the adapter in it."""
    folders = [checkpoint / "merged", checkpoint, *([] if _is_lora(checkpoint) else [checkpoint / "huggingface"])]
    return next((folder for folder in folders if has_weights(folder)), None)


def _is_lora(checkpoint: Path) -> bool:
    return (checkpoint / "lora_train_meta.json").is_file()


def merge(checkpoint: Path) -> Path:
    """The loadable folder of ``checkpoint``, made if there is none yet: from an adapter and the base that it names, or
    from FSDP shards.

    verl's merger (verl/model_merger) joins the shards; of a LoRA run it makes a base model and an adapter, which peft
    merges. Raises StageFailed with the merger's last line if it fails, SettingsError when an adapter's base is gone;
    nothing is left then.
    """
    if folder := merged_folder(checkpoint):
        return folder
    merged = checkpoint / "merged"
    if is_adapter(checkpoint):
        return merge_adapter(checkpoint, base_of(checkpoint), merged)
    partial = checkpoint / ".merged.partial"
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    result = subprocess.run(
        [*command, "--local_dir", checkpoint, "--target_dir", partial], capture_output=True, text=True
    )
    if result.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        raise StageFailed(f"{checkpoint}: verl.model_merger failed: {(result.stderr.splitlines() or [''])[-1]}")
    if is_adapter(partial / "lora_adapter"):
        _set_alpha(partial / "lora_adapter", checkpoint)
        _merge_adapter(str(partial), partial / "lora_adapter", partial)
    partial.rename(merged)
    return merged


def _set_alpha(adapter: Path, checkpoint: Path) -> None:
    """verl 0.6.1's merger writes lora_alpha 0, with which the adapter would do nothing; the training noted the real one
    (stacks/a100/verl_patches.py; 0.9.1 does by itself, and its merger reads it)."""
    file = adapter / "adapter_config.json"
    config, noted = json.loads(file.read_text()), json.loads((checkpoint / "lora_train_meta.json").read_text())
    file.write_text(json.dumps(config | {"lora_alpha": noted["lora_alpha"]}))


def merge_adapter(adapter: Path, base: str, target: Path) -> Path:
    """``target``: the model ``base`` with ``adapter`` merged into it; made once."""
    if not has_weights(target):
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _merge_adapter(base, adapter, partial)
        partial.rename(target)
    return target


def _merge_adapter(base: str, adapter: Path, target: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
    except Exception as error:
        raise SettingsError(f"{adapter}: is no adapter of {base}: {' '.join(str(error).split())[:200]}") from error
    model.merge_and_unload().save_pretrained(target)
    AutoTokenizer.from_pretrained(base).save_pretrained(target)


def base_of(adapter: Path) -> str:
    """The base model that an adapter names; empty if it names none."""
    try:
        return json.loads((adapter / "adapter_config.json").read_text()).get("base_model_name_or_path") or ""
    except (ValueError, AttributeError) as error:
        raise SettingsError(f"{adapter}/adapter_config.json: cannot be read ({error})") from error
