#!/usr/bin/env bash
# GRPO on calculator, Qwen2.5-Coder-1.5B-Instruct without a warm-up, 3 or 4 numbers, episodes of up to 4 turns; MODEL=<another>
# hardware: 1 GPU of 80 GB
# stack: current
# minutes: 30
# takes: MODEL
# reach: pass@1 gain above 0
make all TASK=calculator N_GPUS=1 MODEL="${MODEL:-Qwen/Qwen2.5-Coder-1.5B-Instruct}" INIT=base STEPS=20 \
  TRAIN_BATCH_SIZE=64 ROLLOUT_N=8 MINI_BATCH_SIZE=32 LR=3e-6 TEST_FREQ=0 N=2 MAX_TURNS=4 MAX_TURN_LENGTH=128 \
  MAX_PROMPT_LENGTH=512 MAX_RESPONSE_LENGTH=512
