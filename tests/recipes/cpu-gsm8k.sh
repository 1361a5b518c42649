#!/usr/bin/env bash
# GRPO on generated word problems in GSM8K's form
# hardware: 2 CPU cores, 16 GB
# stack: cpu
# minutes: 25
# reach: pass@1 gain above 0
make all TASK=gsm8k SOURCE=generate SFT_STEPS=24 SFT_BATCH_SIZE=16 STEPS=12 TEST_SIZE=256 GREEDY=0
