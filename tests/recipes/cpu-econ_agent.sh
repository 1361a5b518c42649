#!/usr/bin/env bash
# GRPO with LoRA on a household's decisions
# hardware: 2 CPU cores, 16 GB
# stack: cpu
# minutes: 25
# reach: score gain above 0
make all TASK=econ_agent
