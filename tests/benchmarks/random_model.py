"""Random weights of the shape of a model that people use, in bfloat16: `random_model SHAPE MODEL OUT`.

The tokenizer is MODEL's; it may know fewer tokens. With SHAPE=classifier MODEL's weights with a random head of one
score. On a GPU, where there is one. What is there already stays.
"""

import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.helpers import QWEN25_3B
from verl_tasks.models.find import resolve_model

COMMON = {"max_position_embeddings": 32768, "tie_word_embeddings": False, "num_key_value_heads": 8}
QWEN = COMMON | {"vocab_size": 152064, "num_attention_heads": 40, "hidden_size": 5120}
SHAPES = {
    "qwen3b": QWEN25_3B | {"max_position_embeddings": 32768},
    "qwen7b": QWEN
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    | {"num_attention_heads": 28, "num_key_value_heads": 4},
    "qwen14b": QWEN | {"intermediate_size": 13824, "num_hidden_layers": 48},
    "qwen32b": QWEN | {"intermediate_size": 27648, "num_hidden_layers": 64},
    # 128,256 tokens as published; a tokenizer with more wants more.
    "llama8b": COMMON
    | {"vocab_size": 152064, "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32},
}


def main(shape: str, source: str, out: str) -> None:
    if (Path(out) / "config.json").exists():
        return
    source = str(resolve_model(source))
    started, tokenizer = time.monotonic(), AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if shape == "classifier":
        model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.bfloat16)
        model.config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    else:
        config = AutoConfig.for_model(shape.rstrip("0123456789b").replace("qwen", "qwen2"), **SHAPES[shape], **ends)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(out, max_shard_size="5GB")
    tokenizer.save_pretrained(out)
    count = sum(parameter.numel() for parameter in model.parameters())
    del model
    torch.cuda.empty_cache()  # where the caller trains next
    print(f"{out}: {count:,} parameters, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
