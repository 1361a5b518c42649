#!/usr/bin/env bash
# GRPO on verl-recipe's char_count, words of 5 to 20 letters
# hardware: 1 GPU of 80 GB
# stack: current
# minutes: 15
# reach: accuracy above 0.6
# reach: pass@1 gain above 0
make all TASK=char_count N_GPUS=1 SFT_SIZE=9000 SFT_STEPS=140 SFT_BATCH_SIZE=64 SFT_LR=2e-5 STEPS=40 TRAIN_BATCH_SIZE=128 \
  ROLLOUT_N=8 LR=1e-5
