#!/usr/bin/env bash
# GRPO on generated word problems in GSM8K's form
# hardware: 2 CPU cores, 16 GB
# stack: cpu
# minutes: 25
# reach: pass@1 gain above 0
make all TASK=gsm8k SOURCE=generate STEPS=12 TEST_SIZE=320 GREEDY=0
