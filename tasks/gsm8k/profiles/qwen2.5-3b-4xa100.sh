# shellcheck shell=bash
# Qwen2.5-3B-Instruct, all weights, on 4 x A100-80G.
: "${MODEL:=Qwen/Qwen2.5-3B-Instruct}" "${N_GPUS:=4}" "${GPU_MEMORY_UTILIZATION:=0.6}"
: "${TRAIN_BATCH_SIZE:=256}" "${ROLLOUT_N:=8}" "${MAX_TOKENS_PER_GPU:=32768}" "${MICRO_BATCH_SIZE:=16}"
