"""NVIDIA GPUs, verl 0.9.1 with vLLM 0.24.0.

How to install: docs/INSTALLATION.md. What makes it fast, measured: docs/GPU.md.
"""

import os

from verl_tasks.machine import cluster
from verl_tasks.machine.hardware import CUDA_GRAPHS
from verl_tasks.machine.memory import PROMPTS_ONCE
from verl_tasks.settings import Settings
from verl_tasks.stacks import PADDED, WHOLE_RESPONSES

VERL = "0.9.1"

# There is no flash-attn wheel for torch 2.11: attention is torch's own kernel.
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "verl_tasks.verl_plugins.patches,verl_tasks.verl_plugins.varlen_attention",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",  # ROLLOUT_DTYPE=fp8: DeepGEMM compiles as it runs, and wants CUDA's compiler
}

# The module that runs verl's trainer: its processes as forks of one.
LAUNCHER = ["verl_tasks.verl_plugins.forked", "vllm.v1.worker.gpu_worker"]

# How sequences pass through a model, best first; training/parity.py takes the first that is right for MODEL. A fused
# head takes log-probs and entropy from the hidden states. Without flash-attn verl takes them from the logits, a few
# kernels for each token (verl/utils/torch_functional.py, logprobs_from_logits_v2). Of a plain model each prompt is
# computed once for all of its responses in a pass.
PATHS = {
    "packed, prompts once, fused head": {"attention": PROMPTS_ONCE, "packed": True, "fused": True},
    "packed, fused head": {"attention": "varlen", "packed": True, "fused": True},
    "packed": {"attention": "varlen", "packed": True, "fused": False},
    **PADDED,
}

# RMSNorm, SwiGLU and rotary positions in one kernel each, where they too are right for MODEL. transformers' eager
# layers start several small ones for each.
LIGER = True

STORAGE_UNITS = 8  # verl's default (trainer/config/transfer_queue)

RL_OVERRIDES = [
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.rollout.max_num_seqs=1024",
    "actor_rollout_ref.rollout.max_num_batched_tokens=16384",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_cudagraph_capture_size=1024",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=verl_tasks.verl_plugins.gpu_worker.SharedGPUExtension",
    WHOLE_RESPONSES,
    "critic.strategy=fsdp2",
]
SFT_OVERRIDES = ["engine.strategy=fsdp2"]


def ray_overrides(s: Settings) -> list[str]:
    """As many CPUs as a training holds, of a Ray that it starts itself: with fewer it would wait for ever."""
    return [f"ray_kwargs.ray_init.num_cpus={max(os.cpu_count() or 1, cluster.held_cpus(s))}"]


def rl_overrides(s: Settings) -> list[str]:
    """LoRA: vLLM reads the base model itself. verl's default sends it first, gathered in float32 in RAM, and a tensor
    above its bucket of 2,048 MB (vocabulary x width of 7B and more) is never received (bucketed_weight_transfer.py).

    One turn: CUDA graphs without torch.compile, 16 s of a start. Where prompts come while others are answered, verl's
    default stays: such a step has no graph of decoding."""
    overrides = ["actor_rollout_ref.rollout.load_format=auto"] if s.LORA_RANK else []
    if not s.multi_turn and s.ASYNC == "off":
        graphs = ",".join(f"{name}:{value}" for name, value in CUDA_GRAPHS.items())
        overrides.append(f"+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config={{{graphs}}}")
    return overrides
