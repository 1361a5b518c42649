# shellcheck shell=bash
# Qwen3-4B, all weights, on 8 x A100-80G.
: "${MODEL:=Qwen/Qwen3-4B}" "${N_GPUS:=8}" "${GPU_MEMORY_UTILIZATION:=0.6}"
: "${TRAIN_BATCH_SIZE:=256}" "${ROLLOUT_N:=8}" "${MAX_TOKENS_PER_GPU:=24576}" "${MICRO_BATCH_SIZE:=8}"
: "${MAX_RESPONSE_LENGTH:=2048}" # it thinks before it answers
