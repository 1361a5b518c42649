"""NVIDIA GPUs of the Ampere generation: verl 0.6.1 with torch 2.8.0, vLLM 0.11.0 and flash-attn 2.8.1.

The overrides have verl 0.9.1's names, as all do; training/verl_versions.py translates them to 0.6.1's.
"""

VERL = "0.6.1"

DEFAULTS = {"ROLLOUT_CORRECTION": "none"}  # until a training of this stack has learned with it
DEFAULTS["LOGGER"] = "tensorboard"  # for `make monitor`: trackio needs another huggingface-hub

MULTI_TURN_PROBLEM = "is multi-turn, which STACK=a100 (verl 0.6.1) cannot train; take STACK=current"

ASYNC_PROBLEM = "is not in the trainer of STACK=a100 (verl 0.6.1); take STACK=current"

FP8_PROBLEM = "an A100 has no 8-bit products; take STACK=current on a Hopper GPU"

# The fused heads of verl 0.6.1 take a slice's first token as its last label (models/transformers/dense_common.py,
# torch.roll); 0.9.1 gives them the labels of the whole row.
SP_PROBLEM = "STACK=a100 (verl 0.6.1) has wrong labels where slices of a sequence meet; take STACK=current"

# verl reads this in every process.
ENVIRONMENT = {"VERL_USE_EXTERNAL_MODULES": "verl_tasks.verl_plugins.verl_061.patches"}

RL_OVERRIDES = [
    "+actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.model.use_fused_kernels=True",
    "actor_rollout_ref.rollout.max_num_batched_tokens=16384",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.cuda_graph_sizes=1024",
    # Log-probs at TEMPERATURE, as the trainer's are and as verl 0.9.1 asks for them; vLLM's own default is 1.
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.logprobs_mode=processed_logprobs",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=verl_tasks.verl_plugins.verl_061.many_sequences.ManySequences",
    "critic.model.use_remove_padding=True",
]
SFT_OVERRIDES = [
    "+model.override_config.attn_implementation=flash_attention_2",
    "model.use_remove_padding=True",
]
