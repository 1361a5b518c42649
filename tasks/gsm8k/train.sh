#!/usr/bin/env bash
# Grade-school math word problems with a number as the answer.
# Any variable can be given: make train TASK=gsm8k LR=2e-6 ARGS="trainer.total_epochs=1". All of them: make settings.
default() { :; } # make reads these lines

default MODEL Qwen/Qwen2.5-3B-Instruct cpu=embedded # a hub id, a folder, or `embedded` (SmolLM2-135M-Instruct)
default SOURCE auto                             # auto | hub (openai/gsm8k) | generate; FILE= goes before
default DIFFICULTY hard cpu=easy                # hard: the hub, or all generated problems | easy: short generated ones
default TRAIN_SIZE 7473 cpu=512                 # what GSM8K has; 0: all
default TEST_SIZE 1319 cpu=128                  # what GSM8K has; 0: all
default REWARD strict                           # strict | flexible (the last number will do)
default STEPS 100 cpu=8                         # training steps
default SFT_STEPS 64 cpu=16                     # steps of the warm-up
default MAX_PROMPT_LENGTH 512 cpu=192           # tokens
default MAX_RESPONSE_LENGTH 1024 cpu=96         # tokens

cd "$(dirname "$0")" && exec make --no-print-directory -C ../.. "${STAGE:-train}" TASK="${PWD##*/}" ARGS="${*@Q}"
