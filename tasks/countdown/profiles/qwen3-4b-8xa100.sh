# shellcheck shell=bash
# Qwen3-4B, all weights, on 8 x A100-80G.
default MODEL Qwen/Qwen3-4B
default N_GPUS 8
default GPU_MEMORY_UTILIZATION 0.6
default TRAIN_BATCH_SIZE 256
default ROLLOUT_N 8
default MAX_TOKENS_PER_GPU 24576
default MICRO_BATCH_SIZE 8
default MAX_RESPONSE_LENGTH 2048 # it thinks before it answers
default INIT base
default STEPS 100
default LR 1e-6
