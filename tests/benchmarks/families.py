"""Which pass of a stack computes the numbers of a family of models: the table of docs/GPU.md.

    python -m tests.benchmarks.families [--out FILE.json] [NAME ...]       2 minutes on one core, 10 with liger-kernel

Each config is made small and compared as before a training (verl_plugins/parity.py), with a critic too where
there is one. liger-kernel and triton are in the packages of `current`.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path

from verl_tasks.stacks import current
from verl_tasks.training import parity

V = 97
B = dict(
    vocab_size=V,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.15,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
H = dict(B, head_dim=16)
SMALL = dict(vocab_size=V, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
SL = ["sliding_attention", "full_attention"] * 2
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
ROUTED |= dict(first_k_dense_replace=1, n_group=1, topk_group=1)
MLA = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
MLA |= dict(num_key_value_heads=4)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
LINEAR |= dict(layer_types=["linear_attention", "full_attention"] * 2)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1)
GEMMA2 = dict(H, sliding_window=8, query_pre_attn_scalar=16, layer_types=SL)
GEMMA3N = dict(H, sliding_window=8, layer_types=SL, num_kv_shared_layers=0, vocab_size_per_layer_input=V)
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=32)
SEES = dict(hidden_size=32, intermediate_size=32, patch_size=14)
F = {
    "qwen2 (2.5 0.5-3B, tied)": ("qwen2", dict(B, tie_word_embeddings=True)),
    "qwen2 (2.5 7B+, DeepSeek-R1-Distill-Qwen)": ("qwen2", dict(B, tie_word_embeddings=False)),
    "qwen2 sliding": ("qwen2", dict(B, use_sliding_window=True, sliding_window=8, max_window_layers=2)),
    "qwen3 (tied 0.6-4B)": ("qwen3", dict(H, tie_word_embeddings=True)),
    "qwen3 (untied 8B+)": ("qwen3", dict(H, tie_word_embeddings=False)),
    "qwen3_moe": ("qwen3_moe", dict(H, **MOE)),
    "qwen2_moe": ("qwen2_moe", dict(B, **MOE, shared_expert_intermediate_size=32)),
    "llama (3.x 8B, DeepSeek-Distill-Llama)": ("llama", dict(B, rope_parameters=LLAMA3)),
    "mistral (sliding)": ("mistral", dict(H, sliding_window=8)),
    "ministral": ("ministral", dict(H, sliding_window=8, layer_types=SL)),
    "ministral3 (text)": ("ministral3", dict(H)),
    "mixtral": ("mixtral", dict(B, num_local_experts=4)),
    "gemma": ("gemma", dict(H)),
    "gemma2 (as published)": ("gemma2", GEMMA2),
    "gemma2 (no attn softcap)": ("gemma2", dict(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=5.0)),
    "gemma3_text (270M, 1B)": ("gemma3_text", GEMMA2),
    "gemma3 (4B+, with vision)": (
        "gemma3",
        dict(
            text_config=GEMMA2,
            vision_config=dict(SEES, num_hidden_layers=1, num_attention_heads=2, image_size=28),
            mm_tokens_per_image=4,
            image_token_index=90,
            boi_token_index=91,
            eoi_token_index=92,
        ),
    ),
    "gemma4_text": (
        "gemma4_text",
        dict(GEMMA3N, hidden_size_per_layer_input=0, global_head_dim=16, final_logit_softcapping=5.0),
    ),
    "gemma3n_text": (
        "gemma3n_text",
        dict(
            GEMMA3N,
            hidden_size_per_layer_input=16,
            laurel_rank=8,
            activation_sparsity_pattern=[0.0] * 4,
            intermediate_size=[96] * 4,
        ),
    ),
    "phi (1, 1.5, 2)": ("phi", dict(B)),
    "phi3 (3.5, 4, 4-mini)": ("phi3", dict(B, sliding_window=8)),
    "phimoe": ("phimoe", dict(B, num_local_experts=4, sliding_window=None, lm_head_bias=True)),
    "glm": ("glm", dict(H)),
    "glm4": ("glm4", dict(H)),
    "glm4_moe": ("glm4_moe", dict(H, **ROUTED)),
    "glm4_moe_lite (4.7-Flash, MLA)": ("glm4_moe_lite", B | ROUTED | MLA),
    "deepseek_v3 (MLA)": ("deepseek_v3", B | ROUTED | MLA),
    "granite (3.x)": (
        "granite",
        dict(B, logits_scaling=8.0, embedding_multiplier=3.0, attention_multiplier=0.1, residual_multiplier=0.5),
    ),
    "granitemoehybrid (4.x, mamba)": (
        "granitemoehybrid",
        dict(
            B,
            logits_scaling=4.0,
            layer_types=["mamba", "attention"] * 2,
            **MAMBA,
            mamba_expand=2,
            num_local_experts=0,
            shared_intermediate_size=64,
            position_embedding_type="rope",
        ),
    ),
    "cohere (Command-R)": ("cohere", dict(B, logit_scale=0.25)),
    "cohere2 (Command-R7B)": ("cohere2", dict(B, logit_scale=0.25, sliding_window=8, layer_types=SL)),
    "olmo2": ("olmo2", dict(B)),
    "olmo3": ("olmo3", dict(B, sliding_window=8, layer_types=SL)),
    "smollm3": ("smollm3", dict(B)),
    "gpt_oss": ("gpt_oss", dict(H, sliding_window=8, layer_types=SL, num_local_experts=4, num_experts_per_tok=2)),
    "lfm2 (LiquidAI)": ("lfm2", dict(B, layer_types=["conv", "full_attention"] * 2)),
    "qwen3_next": ("qwen3_next", dict(H, **MOE, **LINEAR, shared_expert_intermediate_size=32)),
    "qwen3_5_text": ("qwen3_5_text", dict(H, **LINEAR)),
    "qwen3_5 (with vision)": (
        "qwen3_5",
        dict(
            text_config=dict(H, **LINEAR),
            vision_config=dict(SEES, depth=1, num_heads=2, out_hidden_size=64),
            image_token_id=90,
            video_token_id=91,
            vision_start_token_id=92,
            vision_end_token_id=93,
        ),
    ),
    "falcon_h1": ("falcon_h1", dict(B, mamba_d_ssm=64) | MAMBA | dict(mamba_n_heads=4)),
    "exaone4": ("exaone4", dict(B, sliding_window=8, layer_types=SL)),
    "ernie4_5": ("ernie4_5", dict(H)),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", dict(H)),
    "seed_oss": ("seed_oss", dict(H)),
    "nemotron": ("nemotron", dict(B)),
    "stablelm": ("stablelm", dict(B)),
    "starcoder2": ("starcoder2", dict(B, sliding_window=8)),
    "gpt_neox (Pythia)": ("gpt_neox", {k: v for k, v in B.items() if k != "num_key_value_heads"}),
    "gpt2": (
        "gpt2",
        dict(
            vocab_size=V,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=256,
            initializer_range=0.15,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "opt": ("opt", dict(SMALL, ffn_dim=96, max_position_embeddings=256, word_embed_proj_dim=64)),
    "falcon": ("falcon", dict(SMALL, new_decoder_architecture=True, num_kv_heads=2)),
    "llama4_text (chunked)": (
        "llama4_text",
        dict(
            H,
            attention_chunk_size=8,
            num_local_experts=2,
            intermediate_size_mlp=96,
            layer_types=["chunked_attention", "full_attention"] * 2,
        ),
    ),
    "apertus": ("apertus", dict(B)),
    "arcee": ("arcee", dict(B)),
    "bamba": ("bamba", dict(B, attn_layer_indices=[1, 3], **MAMBA)),
    "nemotron_h": (
        "nemotron_h",
        dict(H, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8, n_groups=1, hybrid_override_pattern="M*M-"),
    ),
    "minimax": ("minimax", dict(H, num_local_experts=4)),
}


def compared(kind: str, values: dict) -> dict:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    from verl_tasks.verl_plugins import parity as program

    config = AutoConfig.for_model(kind, **values)
    names = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if "vision_config" in values else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    config.architectures = [names[kind]]
    with contextlib.redirect_stdout(io.StringIO()):
        found = program.compared(config.to_dict(), current.PATHS, critic=False, liger=current.LIGER)
        taken = {name: current.PATHS[name] for name, result in found.get("paths", {}).items() if result["agrees"]}
        critic = program.compared(config.to_dict(), taken, critic=True) if taken else {}
    return found | {"critic": any(result["agrees"] for result in critic.get("paths", {}).values())}


def row(name: str, found: dict) -> str:
    """A row of the table: family, the pass taken, with liger-kernel or not, what came of the best, METHOD=ppo."""
    paths = found.get("paths", {})
    taken = next((path for path, result in paths.items() if result["agrees"]), "refused")
    first = next(iter(paths.values()), {})
    best = "right" if first.get("agrees") else first.get("failed", found.get("unknown", "")).partition(":")[0]
    best = f"{first['nats']:.2g} nats off" if "nats" in first and not first["agrees"] else best
    liger = "yes" if found.get("liger", {}).get("agrees") else "no"
    critic = "yes" if found["critic"] else "no"
    return f"| {name} | {'not compared' if 'unknown' in found else taken} | {liger} | {best} | {critic} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if os.environ.get("VERL_PLATFORM") != "cpu":
        environment = os.environ | parity.ENVIRONMENT | {"TRANSFORMERS_VERBOSITY": "error"}
        os.execve(
            sys.executable,
            [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.families", *sys.argv[1:]],
            environment,
        )
    import verl  # noqa: F401  (loads VERL_USE_EXTERNAL_MODULES)

    from verl_tasks.verl_plugins import parity as program

    program.start()
    results = {}
    print("| family | pass | liger-kernel | the best pass | `METHOD=ppo` |\n|---|---|---|---|---|")
    for name, (kind, values) in F.items():
        if not given.names or any(each in name for each in given.names):
            results[name] = compared(kind, values)
            print(row(name, results[name]), flush=True)
    if given.out:
        versions = {name: parity.installed(name) for name in parity.PACKAGES}
        given.out.write_text(json.dumps(versions | {"families": results}, indent=1) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()
