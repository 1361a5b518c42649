#!/usr/bin/env bash
# Countdown: reach a target with all the given numbers.
# Any variable can be given: make train TASK=countdown LR=2e-6 ARGS="trainer.total_epochs=1". All of them: make settings.
default() { :; } # make reads these lines

default MODEL Qwen/Qwen2.5-Coder-1.5B-Instruct cpu=embedded # a hub id, a folder, or `embedded` (SmolLM2-135M-Instruct)
default SOURCE generate                         # generate | hub (Jiayi-Pan/Countdown-Tasks-3to4) | a folder of that form
default DIFFICULTY hard cpu=easy                # easy: 2 numbers up to 99 | hard: 3 or 4
default TRAIN_SIZE 8192 cpu=512                 # training prompts
default TEST_SIZE 1024 cpu=128                  # held-out prompts
default INIT sft                                # base: hard has almost no right samples to learn from
default SFT_SIZE 8192 cpu=512                   # demonstrations of the warm-up
default SFT_STEPS 64 cpu=5                      # steps of the warm-up; on a CPU few: RL is to learn the rest
default SFT_BATCH_SIZE 128 cpu=32               # demonstrations a step
default SFT_LR 2e-5 cpu=3e-4                    # rate of the warm-up
default STEPS 20 cpu=8                          # training steps
default LR 5e-6 cpu=1e-5                        # rate of RL; with INIT=base, on a GPU, LR=2e-6
default MAX_PROMPT_LENGTH 256 cpu=128           # tokens
default MAX_RESPONSE_LENGTH 1024 cpu=64         # tokens

cd "$(dirname "$0")" && exec make --no-print-directory -C ../.. "${STAGE:-train}" TASK="${PWD##*/}" ARGS="${*@Q}"
