#!/usr/bin/env bash
# GRPO on calculator, episodes of several turns
# hardware: 2 CPU cores, 16 GB
# stack: cpu
# minutes: 25
# reach: pass@1 gain above 0
make all TASK=calculator
