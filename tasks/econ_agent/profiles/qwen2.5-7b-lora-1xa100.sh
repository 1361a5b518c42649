# shellcheck shell=bash
# Qwen2.5-7B-Instruct with a LoRA adapter, on one A100-80G.
: "${MODEL:=Qwen/Qwen2.5-7B-Instruct}" "${N_GPUS:=1}" "${GPU_MEMORY_UTILIZATION:=0.5}"
: "${LORA_RANK:=16}" "${LORA_ALPHA:=32}" "${TRAIN_BATCH_SIZE:=64}" "${ROLLOUT_N:=8}" "${MAX_TOKENS_PER_GPU:=16384}" "${MICRO_BATCH_SIZE:=8}"
