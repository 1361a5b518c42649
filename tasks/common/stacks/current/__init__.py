"""NVIDIA GPUs, verl 0.9.1 with vLLM 0.24.0.

How to install: docs/INSTALLATION.md. What makes it fast, measured: docs/GPU.md.
"""

from tasks.common.stacks import WHOLE_RESPONSES

VERL = "0.9.1"

# There is no flash-attn wheel for torch 2.11: attention is torch's own kernel.
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "tasks.common.verl_plugins.patches,tasks.common.stacks.current.varlen_attention",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}

# The module that runs verl's trainer: its processes as forks of one.
LAUNCHER = ["tasks.common.verl_plugins.forked", "tasks.common.stacks.current.preload"]

OVERRIDES: list[str] = []
# Fused kernels: log-probs and entropy from the hidden states. Without flash-attn verl takes them from the logits,
# a few kernels for each token (verl/utils/torch_functional.py, logprobs_from_logits_v2).
RL_OVERRIDES = [
    "+actor_rollout_ref.model.override_config.attn_implementation=varlen",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.model.use_fused_kernels=True",
    "actor_rollout_ref.model.fused_kernel_options.impl_backend=torch",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.ref.strategy=fsdp2",
    "actor_rollout_ref.rollout.max_num_seqs=1024",
    "actor_rollout_ref.rollout.max_num_batched_tokens=16384",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_cudagraph_capture_size=1024",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=tasks.common.stacks.current.vllm_worker.SharedGPUExtension",
    WHOLE_RESPONSES,
    "critic.strategy=fsdp2",
    "+critic.model.override_config.attn_implementation=varlen",
    "critic.model.use_remove_padding=True",
]
SFT_OVERRIDES = [
    "engine.strategy=fsdp2",
    "+model.override_config.attn_implementation=varlen",
    "model.use_remove_padding=True",
    "model.use_fused_kernels=True",
    "model.fused_kernel_options.impl_backend=torch",
]
