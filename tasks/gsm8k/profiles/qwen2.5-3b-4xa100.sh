# shellcheck shell=bash
# Qwen2.5-3B-Instruct, all weights, on 4 x A100-80G.
default MODEL Qwen/Qwen2.5-3B-Instruct
default N_GPUS 4
default GPU_MEMORY_UTILIZATION 0.6
default TRAIN_BATCH_SIZE 256
default ROLLOUT_N 8
default MAX_TOKENS_PER_GPU 32768
default MICRO_BATCH_SIZE 16
