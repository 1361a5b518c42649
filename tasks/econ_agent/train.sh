#!/usr/bin/env bash
# Each month a worker decides how much to work and to consume.
# Any variable can be given: make train TASK=econ_agent LR=2e-6 ARGS="trainer.total_epochs=1". All of them: make settings.
default() { :; } # make reads these lines

default MODEL Qwen/Qwen2.5-1.5B-Instruct cpu=embedded # a hub id, a folder, or `embedded` (SmolLM2-135M-Instruct)
default SOURCE generate                         # generate (tasks/econ_agent/simulation.py)
default DIFFICULTY hard cpu=easy                # easy: in brief, one example | hard: as EconAgent tells it, three
default REWARD strict                           # strict | lenient (text around the JSON object is allowed)
default STEPS 100 cpu=8                         # training steps
default LORA_RANK 8                             # an adapter; 0: full fine-tuning
default LORA_ALPHA 16                           # LoRA scale
default LR 1e-6 cpu=2e-5                        # of all weights; the adapter's is ten times as high
default SFT_STEPS 64 cpu=16                     # steps of the warm-up
default SFT_BATCH_SIZE 64 cpu=8                 # demonstrations per step; on a CPU few: RL is to learn the rest
default SFT_LR 1e-5 cpu=2e-4                    # of all weights in the warm-up; the adapter's is ten times as high
default MAX_PROMPT_LENGTH 1024 cpu=256          # tokens
default MAX_RESPONSE_LENGTH 128 cpu=48          # tokens

cd "$(dirname "$0")" && exec make --no-print-directory -C ../.. "${STAGE:-train}" TASK="${PWD##*/}" ARGS="${*@Q}"
