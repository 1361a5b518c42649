"""REWARD_MODEL: a sequence classifier whose score is the reward (verl/experimental/reward_loop)."""

from verl_tasks.models.find import loaded
from verl_tasks.settings import Settings, SettingsError

CLASSIFIER = "ForSequenceClassification"


def check(s: Settings) -> None:
    """Raise SettingsError when REWARD_MODEL cannot give scores. Asks the hub for a hub id."""
    from transformers import AutoTokenizer

    config = _config(s.REWARD_MODEL)
    architectures = config.architectures or ["none"]
    if not architectures[0].endswith(CLASSIFIER):
        raise SettingsError(
            f"REWARD_MODEL={s.REWARD_MODEL}: is no sequence classifier: config.json's architectures are "
            f"{', '.join(architectures)}, not …{CLASSIFIER}"
        )
    if config.num_labels != 1:
        raise SettingsError(f"REWARD_MODEL={s.REWARD_MODEL}: has {config.num_labels} labels; a reward is one number")
    if not loaded(AutoTokenizer, "tokenizer", "REWARD_MODEL", s.REWARD_MODEL).chat_template:
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
    from transformers import AutoConfig

    return loaded(AutoConfig, "config", "REWARD_MODEL", model)
