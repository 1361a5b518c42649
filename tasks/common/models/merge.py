"""Checkpoints of verl and of DPO, and LoRA adapters, as folders that vLLM and transformers load.

An adapter is not merged for sampling: bfloat16 has too few digits for the small change that it makes to a weight. If
a whole model is needed, it is merged and saved in float32.
"""

import json
import math
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from verl_tasks.files import folder_beside, read_json, write_json
from verl_tasks.process import StageFailed, die_with_parent
from verl_tasks.settings import SettingsError

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's max_lora_rank
SPECIAL = ("use_dora", "modules_to_save", "target_parameters", "rank_pattern", "alpha_pattern")
# Layers in which the vLLM of every stack applies an adapter.
LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

WITHOUT_ADAPTERS = {"stablelm"}  # families with such layers whose class in vLLM takes no adapter


def has_weights(folder: Path) -> bool:
    """Whether ``folder`` is a whole model in transformers' form, with all the files that its index names."""
    index, found = folder / "model.safetensors.index.json", [file.name for file in folder.glob("*.safetensors")]
    if not (folder / "config.json").is_file() or not found:
        return False
    parts = read_json(index).get("weight_map")
    return not index.exists() or (isinstance(parts, dict) and all(part in found for part in parts.values()))


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
    return str(adapter_config(adapter).get("base_model_name_or_path") or "")


def base_model(model: str) -> str:
    """``model``, or the base model that the adapter ``model`` names."""
    folder = Path(model).expanduser()
    return (base_of(folder) or model) if is_adapter(folder) else model


def sampled_as_adapter(adapter: Path) -> bool:
    """Whether vLLM can apply ``adapter`` to its base model; any other is merged."""
    config = adapter_config(adapter)
    names = config.get("target_modules")
    if not isinstance(names, list) or any(config.get(name) for name in SPECIAL) or config.get("r", 0) > RANKS[-1]:
        return False
    if config.get("bias", "none") != "none" or _family(base_of(adapter)) in WITHOUT_ADAPTERS:
        return False
    return {name.rpartition(".")[2] for name in names} <= LAYERS


def _family(model: str) -> str | None:
    """The model_type of a folder, or of a hub id in the cache; None where neither has a config."""
    from huggingface_hub import try_to_load_from_cache

    file = Path(model).expanduser() / "config.json"
    if not file.parent.is_dir():
        with suppress(ValueError):  # no hub id: a folder that is gone
            file = Path(str(try_to_load_from_cache(model, "config.json")))  # or none of that name
    return read_json(file).get("model_type")


def max_rank(adapter: Path) -> int:
    """The smallest of RANKS that ``adapter`` fits."""
    return next(rank for rank in RANKS if rank >= adapter_config(adapter)["r"])


# ---- checkpoints


def whole_folder(checkpoint: Path) -> Path | None:
    """The whole model of ``checkpoint`` if it exists already: of a folder with verl's FSDP shards, or of one of DPO
    (training/trl_dpo.py) with the model or the adapter."""
    folders = [checkpoint / "merged", checkpoint, *([] if is_lora(checkpoint) else [checkpoint / "huggingface"])]
    return next((folder for folder in folders if has_weights(folder)), None)


def is_lora(checkpoint: Path) -> bool:
    """Whether a LoRA training wrote ``checkpoint``."""
    return (checkpoint / "lora_train_meta.json").is_file() or is_adapter(checkpoint)


def ready(checkpoint: Path) -> Path | None:
    """What `loadable` returns, where nothing is left to make for it."""
    adapter = checkpoint if is_adapter(checkpoint) else checkpoint / "adapter"
    if not is_lora(checkpoint):
        return whole_folder(checkpoint)
    if not is_adapter(adapter):
        return None
    return adapter if sampled_as_adapter(adapter) else whole_folder(checkpoint)


def loadable(checkpoint: Path, base: str) -> Path:
    """The model for evaluation, chat and further training: the adapter of ``checkpoint``, or the whole model.

    ``base``: the adapter's base model, a folder or a hub id. Raises as ``merge``.
    """
    if is_lora(checkpoint) and sampled_as_adapter(adapter := adapter_folder(checkpoint, base)):
        return adapter
    return merge(checkpoint, base)


def adapter_folder(checkpoint: Path, base: str) -> Path:
    """The adapter of a LoRA checkpoint in peft's form, in float32; made on the first call.

    Raises StageFailed, and leaves nothing, when verl's merger cannot read the shards.
    """
    if is_adapter(checkpoint):
        return checkpoint
    adapter = checkpoint / "adapter"
    return adapter if is_adapter(adapter) else _merged(checkpoint, adapter, "verl_tasks.verl_plugins.adapter", base)


def merge(checkpoint: Path, base: str = "") -> Path:
    """The whole model of ``checkpoint``: an adapter merged into ``base``, or FSDP shards joined by verl/model_merger.

    Made on the first call. Raises StageFailed with the merger's last line, or SettingsError when an adapter's base is
    gone; leaves nothing then.
    """
    if folder := whole_folder(checkpoint):
        return folder
    merged = checkpoint / "merged"
    if is_lora(checkpoint):
        adapter = adapter_folder(checkpoint, base)
        return merge_adapter(adapter, base_of(adapter), merged)
    return _merged(checkpoint, merged, "verl.model_merger")


def _merged(checkpoint: Path, target: Path, module: str, *more: str) -> Path:
    """``target``, as verl's merger, or the one of ``module`` in its place, makes it of ``checkpoint``."""
    command = [sys.executable, "-m", module, "merge", "--backend", "fsdp", "--local_dir", str(checkpoint)]
    with folder_beside(target) as partial:
        own = [*command, "--target_dir", str(partial), *more]
        result = subprocess.run(own, capture_output=True, text=True, preexec_fn=die_with_parent)
        if result.returncode:
            raise StageFailed(f"{checkpoint}: verl.model_merger failed: {(result.stderr.splitlines() or [''])[-1]}")
    return target


# ---- merging


def merge_adapter(adapter: Path, base: str, target: Path) -> Path:
    """``target``: the model ``base`` with ``adapter`` merged into it, in float32; made on the first call."""
    if has_weights(target):
        return target
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        whole = AutoModelForCausalLM.from_pretrained(base, dtype="float32", trust_remote_code=False)
        model = PeftModel.from_pretrained(whole, adapter)
    except Exception as error:
        raise SettingsError(f"{adapter}: is not an adapter of {base}: {' '.join(str(error).split())[:200]}") from error
    note = {"adapter": str(adapter), "base": base, "lost_in_bfloat16": lost_in_bfloat16(model)}
    with folder_beside(target) as partial:
        model.merge_and_unload().save_pretrained(partial)
        AutoTokenizer.from_pretrained(base, trust_remote_code=False).save_pretrained(partial)
        write_json(partial / "merge.json", note)
    return target


def lost_in_bfloat16(model) -> float:
    """The share of an adapter's change that a merge in bfloat16 would lose: ||D - (bf16(W + D) - bf16(W))|| / ||D||.

    ``model``: a PeftModel with float32 weights W and the change D of its adapter; Frobenius norms over all layers. 0 if
    there is no change.
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
    """A note on the precision of a merge into ``folder``; empty if nothing was merged."""
    lost = read_json(folder / "merge.json").get("lost_in_bfloat16")
    if lost is None:
        return ""
    return f"; in float32: loaded in bfloat16 it loses {lost:.0%} of the adapter's change (relative norm)"
