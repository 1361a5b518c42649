#!/usr/bin/env bash
# Arithmetic with a calculator, over several turns.
# Any variable can be given: make train TASK=calculator LR=2e-6 ARGS="trainer.total_epochs=1". All of them: make settings.
default() { :; } # make reads these lines

default MODEL Qwen/Qwen2.5-1.5B-Instruct cpu=embedded # a hub id, a folder, or `embedded` (SmolLM2-135M-Instruct)
default SOURCE generate                         # generate | gsm8k (openai/gsm8k, word problems); FILE= goes before
default DIFFICULTY hard cpu=easy                # easy: 2 numbers up to 999 | hard: 3 or 4 up to 9999
default TRAIN_SIZE 8192 cpu=512                 # training prompts
default TEST_SIZE 512 cpu=64                    # held-out prompts
default SFT_STEPS 64 cpu=4                      # steps of the warm-up; on a CPU few: RL is to learn the rest
default SFT_BATCH_SIZE 64 cpu=8                 # demonstrations per step
default STEPS 100 cpu=8                         # training steps
default MAX_TURNS 12                            # of the model in an episode
default MICRO_BATCH_SIZE 16 cpu=8               # long episodes: fewer sequences in one pass
default MAX_TURN_LENGTH 256 cpu=64              # tokens
default MAX_PROMPT_LENGTH 512 cpu=192           # tokens
default MAX_RESPONSE_LENGTH 1024 cpu=128        # tokens of all turns and results

cd "$(dirname "$0")" && exec make --no-print-directory -C ../.. "${STAGE:-train}" TASK="${PWD##*/}" ARGS="${*@Q}"
