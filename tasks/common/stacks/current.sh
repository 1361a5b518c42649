# shellcheck shell=bash
# NVIDIA GPUs, verl 0.9.1 with vLLM 0.24.0. The values are those of the task's config block.
# How to install: docs/GPU.md. Attention is sdpa: there is no flash-attn wheel for torch 2.11.

STACK_VERL=0.9.1
# verl reads this in every process.
VERL_USE_EXTERNAL_MODULES=tasks.common.verl_patches${VERL_USE_EXTERNAL_MODULES:+,$VERL_USE_EXTERNAL_MODULES}

STACK_OVERRIDES="
"
STACK_RL_OVERRIDES="
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.ref.strategy=fsdp2
critic.strategy=fsdp2
critic.model.use_remove_padding=False
"
STACK_SFT_OVERRIDES="
engine.strategy=fsdp2
+model.override_config.attn_implementation=sdpa
model.use_remove_padding=False
"
VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
