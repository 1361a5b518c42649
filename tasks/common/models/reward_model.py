"""REWARD_MODEL: a sequence classifier whose score is the reward (verl/experimental/reward_loop)."""

from pathlib import Path

from tasks.common.models.find import resolve_model
from tasks.common.models.merge import is_adapter
from tasks.common.settings import Settings, SettingsError
from tasks.common.text import one_line

CLASSIFIER = "ForSequenceClassification"


def find(model: str) -> str:
    """The reward model's path for verl, a folder or a hub id. Raises SettingsError as find.py, and for an adapter."""
    if is_adapter(Path(model).expanduser()):
        raise SettingsError(f"REWARD_MODEL={model}: is a LoRA adapter; merge it into its classifier first")
    try:
        return resolve_model(model)
    except SettingsError as error:
        raise SettingsError(f"REWARD_{error}") from None


def check(s: Settings) -> None:
    """Raise SettingsError when REWARD_MODEL cannot give scores. Asks the hub for a hub id."""
    if not s.REWARD_MODEL:
        return
    from transformers import AutoTokenizer

    path, config = find(s.REWARD_MODEL), _config(s.REWARD_MODEL)
    architectures = config.architectures or ["none"]
    if not architectures[0].endswith(CLASSIFIER):
        raise SettingsError(
            f"REWARD_MODEL={s.REWARD_MODEL}: is no sequence classifier: config.json's architectures are "
            f"{', '.join(architectures)}, not …{CLASSIFIER}"
        )
    if config.num_labels != 1:
        raise SettingsError(f"REWARD_MODEL={s.REWARD_MODEL}: has {config.num_labels} labels; a reward is one number")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise SettingsError(f"REWARD_MODEL={s.REWARD_MODEL}: its tokenizer: {one_line(str(error), 200)}") from error
    if not tokenizer.chat_template:
        raise SettingsError(
            f"REWARD_MODEL={s.REWARD_MODEL}: its tokenizer has no chat template, which it needs to read the answer"
        )


def context_length(s: Settings) -> int:
    """Tokens of the longest chat that the reward model must read.

    It has its own tokenizer and template, so twice the policy's lengths; at most its context, but not all of it: vLLM
    would reserve cache for it.
    """
    wanted = 2 * (s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH) + 512
    return min(wanted, getattr(_config(s.REWARD_MODEL), "max_position_embeddings", wanted))


def _config(model: str):
    """The model's config; code that comes with it is not run. Raises SettingsError."""
    from transformers import AutoConfig

    path = find(model)
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:
        raise SettingsError(f"REWARD_MODEL={model}: its config: {one_line(str(error), 200)}") from error
