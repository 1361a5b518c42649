#!/usr/bin/env bash
# GRPO on char_count, words of 3 to 6 letters
# hardware: 2 CPU cores, 16 GB
# stack: cpu
# minutes: 25
# reach: pass@1 gain above 0
make all TASK=char_count
