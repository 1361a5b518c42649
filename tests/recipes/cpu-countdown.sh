#!/usr/bin/env bash
# GRPO on countdown, two numbers up to 99
# hardware: 2 CPU cores, 16 GB
# stack: cpu
# minutes: 15
# reach: pass@1 gain above 0
# reach: accuracy gain above 0
make all TASK=countdown
