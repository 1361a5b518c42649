#!/usr/bin/env bash
# GRPO on countdown, two numbers up to 99, 20 steps of 2,048 rollouts
# hardware: 1 GPU of 80 GB
# stack: current
# minutes: 25
# reach: pass@1 gain above 0.4
# reach: accuracy gain above 0.35
make all TASK=countdown N_GPUS=1 MODEL=embedded REWARD=ladder INIT=sft DIFFICULTY=easy TRAIN_SIZE=8192 TEST_SIZE=1024 \
  SFT_SIZE=512 SFT_STEPS=8 SFT_BATCH_SIZE=64 SFT_LR=3e-4 STEPS=20 TRAIN_BATCH_SIZE=256 MINI_BATCH_SIZE=64 ROLLOUT_N=8 \
  LR=1e-5 MAX_PROMPT_LENGTH=128 MAX_RESPONSE_LENGTH=64 SAVE_FREQ=12
