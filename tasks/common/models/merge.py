"""Checkpoints of verl and of DPO, and LoRA adapters, as folders that vLLM and transformers load.

An adapter stays beside its base model: bfloat16, in which models are sampled, holds too few digits for the small change
that it makes to a weight. Where a whole model is needed it is merged, and saved, in float32.
"""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

from tasks.common.process import StageFailed
from tasks.common.settings import SettingsError

# The ranks that vLLM makes room for, and the layers in which both versions apply an adapter.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
SPECIAL = ("use_dora", "modules_to_save", "target_parameters", "rank_pattern", "alpha_pattern")
LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def has_weights(folder: Path) -> bool:
    """Whether ``folder`` is a whole model in transformers' form."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def is_adapter(folder: Path) -> bool:
    """Whether ``folder`` is a LoRA adapter in peft's form."""
    return (folder / "adapter_config.json").is_file()


def adapter_config(adapter: Path) -> dict:
    """peft's config of ``adapter``. Raises SettingsError."""
    try:
        config = json.loads((adapter / "adapter_config.json").read_text())
        config.get("r")
        return config
    except (ValueError, AttributeError) as error:
        raise SettingsError(f"{adapter}/adapter_config.json: cannot be read ({error})") from error


def base_of(adapter: Path) -> str:
    """The base model that an adapter names; empty if it names none."""
    return adapter_config(adapter).get("base_model_name_or_path") or ""


def base_model(model: str) -> str:
    """``model``, or the base model that the adapter ``model`` names."""
    folder = Path(model).expanduser()
    return (base_of(folder) or model) if is_adapter(folder) else model


def sampled_as_adapter(adapter: Path) -> bool:
    """Whether vLLM applies ``adapter`` to its base model as it is; any other is merged."""
    config = adapter_config(adapter)
    names = config.get("target_modules")
    if not isinstance(names, list) or any(config.get(name) for name in SPECIAL) or config.get("r", 0) > RANKS[-1]:
        return False
    return config.get("bias", "none") == "none" and {name.rpartition(".")[2] for name in names} <= LAYERS


def max_rank(adapter: Path) -> int:
    """The least rank of vLLM's in which ``adapter`` fits."""
    return next(rank for rank in RANKS if rank >= adapter_config(adapter)["r"])


# ---- checkpoints


def whole_folder(checkpoint: Path) -> Path | None:
    """The whole model of ``checkpoint`` if there is one already. ``checkpoint`` is the folder with verl's FSDP shards,
    or one of DPO (training/trl_dpo.py), which has the model or the adapter in it."""
    folders = [checkpoint / "merged", checkpoint, *([] if is_lora(checkpoint) else [checkpoint / "huggingface"])]
    return next((folder for folder in folders if has_weights(folder)), None)


def is_lora(checkpoint: Path) -> bool:
    """Whether a checkpoint is of a LoRA training."""
    return (checkpoint / "lora_train_meta.json").is_file() or is_adapter(checkpoint)


def loadable(checkpoint: Path, base: str) -> Path:
    """What evaluation, chat and further training load of ``checkpoint``: its adapter, or the whole model.

    ``base``: what the adapter is of, a folder or a hub id. Raises as ``merge``.
    """
    if not is_lora(checkpoint):
        return merge(checkpoint, base)
    adapter = adapter_folder(checkpoint, base)
    return adapter if sampled_as_adapter(adapter) else merge(checkpoint, base)


def adapter_folder(checkpoint: Path, base: str) -> Path:
    """The adapter of a LoRA checkpoint in peft's form, in float32, made if there is none yet.

    Raises StageFailed when verl's merger cannot read the shards; nothing is left then.
    """
    if is_adapter(checkpoint):
        return checkpoint
    adapter, partial = checkpoint / "adapter", checkpoint / ".adapter.partial"
    if is_adapter(adapter):
        return adapter
    _run_merger(checkpoint, partial, "tasks.common.verl_plugins.adapter")
    file = partial / "lora_adapter/adapter_config.json"
    # verl 0.6.1 writes lora_alpha 0, with which the adapter would do nothing; the training noted the real one
    # (stacks/a100/verl_patches.py).
    noted = json.loads((checkpoint / "lora_train_meta.json").read_text())
    known = {"lora_alpha": noted["lora_alpha"], "base_model_name_or_path": base}
    file.write_text(json.dumps(json.loads(file.read_text()) | known, indent=2))
    file.parent.rename(adapter)
    shutil.rmtree(partial)
    return adapter


def merge(checkpoint: Path, base: str = "") -> Path:
    """The whole model of ``checkpoint``, made if there is none yet: of an adapter and ``base``, or of FSDP shards.

    verl's merger (verl/model_merger) joins the shards. Raises StageFailed with the merger's last line if it fails,
    SettingsError when an adapter's base is gone; nothing is left then.
    """
    if folder := whole_folder(checkpoint):
        return folder
    merged = checkpoint / "merged"
    if is_lora(checkpoint):
        adapter = adapter_folder(checkpoint, base)
        return merge_adapter(adapter, base_of(adapter), merged)
    partial = checkpoint / ".merged.partial"
    _run_merger(checkpoint, partial, "verl.model_merger")
    partial.rename(merged)
    return merged


def _run_merger(checkpoint: Path, target: Path, module: str) -> None:
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", module, "merge", "--backend", "fsdp"]
    result = subprocess.run(
        [*command, "--local_dir", checkpoint, "--target_dir", target], capture_output=True, text=True
    )
    if result.returncode:
        shutil.rmtree(target, ignore_errors=True)
        raise StageFailed(f"{checkpoint}: verl.model_merger failed: {(result.stderr.splitlines() or [''])[-1]}")


# ---- merging


def merge_adapter(adapter: Path, base: str, target: Path) -> Path:
    """``target``: the model ``base`` with ``adapter`` merged into it, in float32; made once."""
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
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="float32"), adapter)
    except Exception as error:
        raise SettingsError(f"{adapter}: is no adapter of {base}: {' '.join(str(error).split())[:200]}") from error
    lost = lost_in_bfloat16(model)
    model.merge_and_unload().save_pretrained(target)
    AutoTokenizer.from_pretrained(base).save_pretrained(target)
    (target / "merge.json").write_text(json.dumps({"adapter": str(adapter), "base": base, "lost_in_bfloat16": lost}))


def lost_in_bfloat16(model) -> float:
    """How much of an adapter's change is lost where its weights are merged in bfloat16, as a relative Frobenius norm.

    ``model``: a PeftModel with float32 weights W and the change D of its adapter. Lost is D less the difference of
    W + D and W, each rounded to bfloat16. 0: nothing, or there is no change.
    """
    from peft.tuners.lora import LoraLayer

    lost = whole = 0.0
    for layer in model.modules():
        for name in layer.active_adapters if isinstance(layer, LoraLayer) else ():
            weight, change = layer.get_base_layer().weight.data, layer.get_delta_weight(name).data
            kept = (weight + change).bfloat16().float() - weight.bfloat16().float()
            lost += float((change - kept).square().sum())
            whole += float(change.square().sum())
    return math.sqrt(lost / whole) if whole else 0.0


def merge_note(folder: Path) -> str:
    """What a merge into ``folder`` has cost, in words; empty where nothing was merged."""
    if not (folder / "merge.json").is_file():
        return ""
    lost = json.loads((folder / "merge.json").read_text())["lost_in_bfloat16"]
    return f"; in float32: loaded in bfloat16 it loses {lost:.0%} of the adapter's change (relative norm)"
