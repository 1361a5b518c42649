#!/usr/bin/env bash
# GRPO on countdown with three and four numbers, SmolLM2-135M from a warm-up on searches
# hardware: 1 GPU of 80 GB
# stack: current
# minutes: 30
# reach: pass@1 start above 0.3
# reach: pass@1 gain above 0.18
# reach: pass@8 gain above -0.02
# reach: entropy above 0.05
make all TASK=countdown PROFILE=smollm2-search-1xh200 REWARD=ladder N=8 GREEDY=0 TEST_FREQ=0
