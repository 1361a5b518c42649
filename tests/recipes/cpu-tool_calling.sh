#!/usr/bin/env bash
# GRPO on generated tool-call dialogues
# hardware: 2 CPU cores, 16 GB
# stack: cpu
# minutes: 25
# reach: pass@1 gain above 0
make all TASK=tool_calling SOURCE=generate
