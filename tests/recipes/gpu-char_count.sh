#!/usr/bin/env bash
# GRPO on verl-recipe's char_count, words of 5 to 20 letters
# hardware: 1 GPU of 80 GB
# stack: current
# minutes: 20
# reach: accuracy above 0.6
# reach: accuracy gain above 0
# reach: pass@1 gain above 0
make all TASK=char_count N_GPUS=1 INIT=sft SFT_SIZE=8872 SFT_STEPS=139 SFT_BATCH_SIZE=64 SFT_LR=1e-4 STEPS=20 \
  TRAIN_BATCH_SIZE=128 ROLLOUT_N=8 MINI_BATCH_SIZE=32 LR=5e-6 LR_WARMUP=3 TEST_FREQ=0 N=2
