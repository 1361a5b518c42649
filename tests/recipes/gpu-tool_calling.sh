#!/usr/bin/env bash
# GRPO on the turns of real tool-call conversations: make recipe NAME=gpu-tool_calling FILE=<conversations>
# hardware: 1 GPU of 80 GB
# stack: current
# minutes: 20
# takes: FILE
# reach: pass@1 gain above 0
make all TASK=tool_calling SOURCE=hub N_GPUS=1 MODEL=embedded INIT=sft MAX_SAMPLES=0 TEST_SIZE=0.25 SFT_STEPS=40 \
  SFT_BATCH_SIZE=32 SFT_LR=1e-4 STEPS=20 TRAIN_BATCH_SIZE=32 ROLLOUT_N=8 LR=1e-5 TEST_FREQ=0 N=8 MAX_PROMPT_LENGTH=1024 \
  MAX_RESPONSE_LENGTH=256
