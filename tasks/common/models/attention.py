"""Which of transformers' attentions computes a model, where no pass of verl's is compared (training/parity.py)."""


def attention(model: str) -> str:
    """sdpa; eager where that would leave out, without a word, the soft cap of ``model`` (Gemma 2), or does not know its
    sinks (gpt-oss)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if capped or not getattr(kind, "_supports_sdpa", True) else "sdpa"
