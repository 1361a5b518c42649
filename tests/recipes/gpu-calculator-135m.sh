#!/usr/bin/env bash
# GRPO on calculator, SmolLM2-135M, 3 or 4 numbers up to 9,999, episodes of up to 4 turns
# hardware: 1 GPU of 80 GB
# stack: current
# minutes: 15
# reach: pass@1 gain above 0.3
make all TASK=calculator N_GPUS=1 MODEL=embedded INIT=sft SFT_SIZE=512 SFT_STEPS=2 SFT_BATCH_SIZE=64 SFT_LR=3e-4 \
  STEPS=20 TRAIN_BATCH_SIZE=64 ROLLOUT_N=8 MINI_BATCH_SIZE=16 LR=1e-5 TEST_FREQ=0 N=2 MAX_TURNS=4 MAX_TURN_LENGTH=96 \
  MAX_PROMPT_LENGTH=384 MAX_RESPONSE_LENGTH=320
