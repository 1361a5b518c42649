# shellcheck shell=bash
# Qwen3-4B-Instruct-2507, all weights, on 8 x A100-80G; prompts with long lists of tools.
: "${MODEL:=Qwen/Qwen3-4B-Instruct-2507}" "${N_GPUS:=8}" "${GPU_MEMORY_UTILIZATION:=0.6}"
: "${TRAIN_BATCH_SIZE:=128}" "${ROLLOUT_N:=8}" "${MAX_TOKENS_PER_GPU:=16384}" "${MICRO_BATCH_SIZE:=4}"
