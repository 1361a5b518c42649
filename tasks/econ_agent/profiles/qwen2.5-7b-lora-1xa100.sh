# shellcheck shell=bash
# Qwen2.5-7B-Instruct with a LoRA adapter, on one A100-80G.
default MODEL Qwen/Qwen2.5-7B-Instruct
default N_GPUS 1
default GPU_MEMORY_UTILIZATION 0.5
default LORA_RANK 16
default LORA_ALPHA 32
default TRAIN_BATCH_SIZE 64
default ROLLOUT_N 8
default MAX_TOKENS_PER_GPU 16384
default MICRO_BATCH_SIZE 8
