# shellcheck shell=bash
# Qwen3-4B-Instruct-2507, all weights, on 8 x A100-80G; prompts with long lists of tools.
default MODEL Qwen/Qwen3-4B-Instruct-2507
default N_GPUS 8
default GPU_MEMORY_UTILIZATION 0.6
default TRAIN_BATCH_SIZE 128
default ROLLOUT_N 8
default MAX_TOKENS_PER_GPU 16384
default MICRO_BATCH_SIZE 4
