"""A thin model: the architecture, vocabulary, tokenizer and chat template of a large one, with few layers of random
weights. It is made from config.json and the tokenizer's files alone, so no weights are fetched."""

import math
import shutil
from pathlib import Path

from verl_tasks.files import folder_beside
from verl_tasks.models.find import VOCABULARIES, embedded_model, is_hub_id
from verl_tasks.models.small import small
from verl_tasks.settings import SettingsError
from verl_tasks.text import one_line

HEADS, HEAD = 2, 32  # vLLM on a CPU wants heads of 32 or more
# Of `teach`: it ends once the mean probability of a whole demonstration is RIGHT, or after MOST_STEPS.
RIGHT, MOST_STEPS, RATE, OTHERS = 0.6, 600, 3e-3, 512
# What a hub id is asked for: config, tokenizer, chat template, stop tokens; never weights.
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
WEIGHTS = ("*.index.json", "*.safetensors", "*.bin")


def config_folder(model: str, variable: str = "MODEL") -> Path:
    """The folder with config.json and the tokenizer of ``model``: `embedded`, a folder, or a hub id, of which only
    small files are fetched. ``variable`` names it in errors. Raises SettingsError."""
    if model == "embedded":
        return embedded_model()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if not is_hub_id(model):
            raise SettingsError(f"{variable}={model}: no such folder, and not a hub id (owner/name)")
        folder = _fetched(model, variable)
    if not (folder / "config.json").is_file():
        raise SettingsError(f"{variable}={model}: has no config.json; a rehearsal needs it and the tokenizer's files")
    if not any(file for name in VOCABULARIES for file in folder.glob(name)):
        raise SettingsError(f"{variable}={model}: has no tokenizer (tokenizer.json); copy its files beside config.json")
    return folder.resolve()


def _fetched(model: str, variable: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(model, allow_patterns=list(SMALL_FILES), ignore_patterns=list(WEIGHTS)))
    except Exception as error:  # no network, no such model, no permission: each raises another class
        fix = f"give {variable} as a folder with its config.json and tokenizer"
        raise SettingsError(f"{variable}={model}: {one_line(str(error), 160)}; {fix}") from error


def write(folder: Path, target: Path, seed: int) -> int:
    """Write the thin model of ``folder`` as ``target``; the number of its parameters. Raises SettingsError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    files = {file for pattern in SMALL_FILES for file in folder.glob(pattern) if file.name != "config.json"}
    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = small(whole, head=HEAD, heads=HEADS)
        with torch.random.fork_rng(), folder_beside(target) as partial:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
            model.save_pretrained(partial)
            for file in files - {file for pattern in WEIGHTS for file in folder.glob(pattern)}:
                shutil.copy(file, partial / file.name)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise SettingsError(f"{folder}: no thin model can be made of it: {one_line(str(error), 200)}") from error
    return model.num_parameters()


def teach(folder: Path, demonstrations: list[tuple[list[int], list[int]]], seed: int) -> float:
    """Train the thin model of ``folder`` until it samples the ``demonstrations`` about as often as not, so that their
    rewards differ. Each is token ids and a mask that is 1 where the model speaks.

    Returns the mean probability of a demonstration. The loss counts all tokens of the demonstrations and OTHERS random
    ones, which stand for the rest of the vocabulary (importance sampling of the softmax; Bengio and Senecal 2003).
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    def padded(rows: list[list[int]]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), batch_first=True)

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        ids = padded([ids for ids, _ in demonstrations])
        there = padded([[1] * len(ids) for ids, _ in demonstrations])
        learned = padded([mask for _, mask in demonstrations])[:, 1:].bool()
        rows, used = torch.where(learned)[0], torch.unique(ids)
        targets = torch.searchsorted(used, ids[:, 1:][learned])
        vectors = model.get_output_embeddings().weight
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
        right = 0.0
        for _ in range(MOST_STEPS):
            hidden = model.base_model(ids, attention_mask=there).last_hidden_state[:, :-1][learned]
            logits = hidden @ vectors[used].T
            others = torch.randint(len(vectors), (OTHERS,))
            others = others[~torch.isin(others, used)]
            rest = (hidden @ vectors[others].T).logsumexp(-1) + math.log((len(vectors) - len(used)) / len(others))
            total = torch.logaddexp(logits.logsumexp(-1), rest) if len(others) else logits.logsumexp(-1)
            loss = total - logits.gather(1, targets[:, None])[:, 0]
            right = torch.zeros(len(ids)).index_add(0, rows, -loss.detach()).exp().mean().item()
            if right >= RIGHT:
                break
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
        model.to(torch.bfloat16).save_pretrained(folder)
    return right
