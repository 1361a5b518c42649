#!/usr/bin/env bash
# Count a letter in a word: the task of verl-recipe.
# Any variable can be given: make train TASK=char_count LR=2e-6 ARGS="trainer.total_epochs=1". All of them: make settings.
default() { :; } # make reads these lines

default MODEL embedded                          # a hub id, a folder, or `embedded` (SmolLM2-135M-Instruct)
default SOURCE generate                         # verl-recipe's data rule
default DIFFICULTY hard cpu=easy                # easy: words of 3 to 6 letters | hard: 5 to 20, as verl-recipe
default TRAIN_SIZE 9000 cpu=512                 # training prompts
default TEST_SIZE 1000 cpu=128                  # held-out prompts
default STEPS 100 cpu=14                        # training steps
default LR "" cpu=1e-5                          # on a CPU; elsewhere the stack's
default LR_WARMUP 3                             # without, Adam's first steps unlearn the warm-up (docs/TUNING.md)
default SFT_STEPS 64 cpu=16                     # steps of the warm-up; on a CPU few: RL is to learn the rest
default SFT_BATCH_SIZE 64 cpu=16                # demonstrations per step
default MAX_PROMPT_LENGTH 128                   # tokens
default MAX_RESPONSE_LENGTH 192 cpu=80          # tokens

cd "$(dirname "$0")" && exec make --no-print-directory -C ../.. "${STAGE:-train}" TASK="${PWD##*/}" ARGS="${*@Q}"
