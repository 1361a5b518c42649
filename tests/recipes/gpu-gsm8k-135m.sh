#!/usr/bin/env bash
# GRPO on GSM8K, SmolLM2-135M from a warm-up on its own solutions; without the hub: FILE=<a folder with train.jsonl and test.jsonl>
# hardware: 1 GPU of 80 GB
# stack: current
# minutes: 25
# takes: FILE
# reach: pass@1 gain above 0
make all TASK=gsm8k SOURCE=hub N_GPUS=1 MODEL=embedded INIT=sft SFT_SIZE=7345 SFT_STEPS=345 SFT_BATCH_SIZE=64 SFT_LR=1e-4 \
  STEPS=30 TRAIN_BATCH_SIZE=64 ROLLOUT_N=16 MINI_BATCH_SIZE=16 LR=1e-5 TEST_FREQ=0 MAX_PROMPT_LENGTH=256 \
  MAX_RESPONSE_LENGTH=320
