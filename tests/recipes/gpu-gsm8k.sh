#!/usr/bin/env bash
# GRPO on GSM8K, Qwen2.5-Coder-1.5B-Instruct without a warm-up; MODEL=<another>; without the hub: FILE=<a folder with train.jsonl and test.jsonl>
# hardware: 1 GPU of 80 GB
# stack: current
# minutes: 30
# takes: FILE MODEL
# reach: pass@1 above 0.78
# reach: pass@1 gain above 0
make all TASK=gsm8k SOURCE=hub N_GPUS=1 MODEL="${MODEL:-Qwen/Qwen2.5-Coder-1.5B-Instruct}" INIT=base STEPS=24 \
  TRAIN_BATCH_SIZE=128 ROLLOUT_N=8 MINI_BATCH_SIZE=64 LR=3e-6 TEST_FREQ=0 GREEDY=0 MAX_PROMPT_LENGTH=256 \
  MAX_RESPONSE_LENGTH=512
