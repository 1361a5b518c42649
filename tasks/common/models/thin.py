"""A thin model: the architecture, vocabulary, tokenizer and chat template of a large one, with two layers of random
weights. It is made from config.json and the tokenizer's files alone, so no weights are fetched."""

import contextlib
import io
import re
import shutil
from pathlib import Path

from tasks.common.files import folder_beside
from tasks.common.models.find import embedded_model
from tasks.common.settings import SettingsError
from tasks.common.text import one_line

LAYERS, HEADS, HEAD = 2, 2, 32  # vLLM on a CPU wants heads of 32 or more
HIDDEN, INTERMEDIATE = HEADS * HEAD, 128
# What a hub id is asked for: config, tokenizer, chat template; never weights.
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
WEIGHTS = ("*.index.json", "*.safetensors", "*.bin")


def config_folder(model: str) -> Path:
    """The folder with config.json and the tokenizer of ``model``: `embedded`, a folder, or a hub id, of which only
    small files are fetched. Raises SettingsError."""
    if model == "embedded":
        return embedded_model()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
            raise SettingsError(f"MODEL={model}: no such folder, and not a hub id (owner/name)")
        folder = _fetched(model)
    if not (folder / "config.json").is_file():
        raise SettingsError(f"MODEL={model}: has no config.json; a rehearsal needs it and the tokenizer's files")
    return folder.resolve()


def _fetched(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(model, allow_patterns=list(SMALL_FILES), ignore_patterns=list(WEIGHTS)))
    except Exception as error:  # no network, no such model, no permission: each raises another class
        fix = "give MODEL as a folder with its config.json and tokenizer"
        raise SettingsError(f"MODEL={model}: {one_line(str(error), 160)}; {fix}") from error


def thin_config(folder: Path):
    """The config of ``folder`` with two layers and few heads. Family, vocabulary, special tokens and tied embeddings
    stay; heads that shared keys still do. Raises SettingsError for a config that names other fields."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"{folder / 'config.json'}: {one_line(str(error), 200)}") from error
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if missing := [name for name in needed if not hasattr(config, name)]:
        raise SettingsError(f"{folder / 'config.json'}: {config.model_type} has no {missing[0]}; it cannot be thinned")
    grouped = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) < config.num_attention_heads
    values = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS}
    values |= {"num_attention_heads": HEADS, "num_key_value_heads": 1 if grouped else HEADS, "head_dim": HEAD}
    values |= {"moe_intermediate_size": HEAD, "num_experts": 4, "num_experts_per_tok": 2}
    for name, value in values.items():
        if hasattr(config, name) or name == "num_key_value_heads":
            setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:LAYERS]
    return config


def write(folder: Path, target: Path, seed: int) -> int:
    """Write the thin model of ``folder`` as ``target``; the number of its parameters. Raises SettingsError."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = thin_config(folder)
    try:
        with torch.random.fork_rng(), folder_beside(target) as partial:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
                model.save_pretrained(partial)
            for file in _of_the_tokenizer(folder):
                shutil.copy(file, partial / file.name)
    except (ValueError, AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise SettingsError(f"{folder}: {config.model_type} cannot be thinned: {one_line(str(error), 200)}") from error
    return sum(parameter.numel() for parameter in model.parameters())


def _of_the_tokenizer(folder: Path) -> list[Path]:
    """Tokenizer, chat template and generation_config.json, which names the stop tokens."""
    files = {file for pattern in SMALL_FILES for file in folder.glob(pattern) if file.is_file()}
    skipped = {file for pattern in WEIGHTS for file in folder.glob(pattern)}
    return sorted(file for file in files - skipped if file.name != "config.json")
