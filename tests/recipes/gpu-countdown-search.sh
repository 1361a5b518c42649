#!/usr/bin/env bash
# GRPO on countdown with three and four numbers, Qwen2.5-Coder-1.5B-Instruct without a warm-up; MODEL=<another>
# hardware: 1 GPU of 80 GB
# stack: current
# minutes: 60
# takes: MODEL
# reach: pass@1 above 0.6
# reach: pass@1 gain above 0
# reach: thinking above 0.5
make all TASK=countdown DIFFICULTY=hard N_GPUS=1 MODEL="${MODEL:-Qwen/Qwen2.5-Coder-1.5B-Instruct}" INIT=base \
  TEST_SIZE=1024 STEPS=60 TRAIN_BATCH_SIZE=128 ROLLOUT_N=8 MINI_BATCH_SIZE=64 LR=3e-6 TEST_FREQ=0 GREEDY=0 \
  MAX_PROMPT_LENGTH=256 MAX_RESPONSE_LENGTH=512
