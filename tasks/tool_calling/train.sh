#!/usr/bin/env bash
# Call the right functions with the right arguments.
# Any variable can be given: make train TASK=tool_calling LR=2e-6 ARGS="trainer.total_epochs=1". All of them: make settings.
default() { :; } # make reads these lines

default MODEL Qwen/Qwen3-4B-Instruct-2507 cpu=embedded # a hub id, a folder, or `embedded` (SmolLM2-135M-Instruct)
default SOURCE auto                             # auto | hub (Bingguang/HardGen) | generate; FILE= goes before
default MAX_SAMPLES 1000                        # turns of the assistant, before the split; 0: all
default DIFFICULTY hard cpu=easy                # hard: the hub, or long generated dialogues | easy: short generated ones
default TRAIN_SIZE 0                            # 0: all
default TEST_SIZE 0.05 cpu=128                  # a share, or a count
default REWARD instruct                         # strict (with thinking) | instruct
default SFT_STEPS 64 cpu=16                     # steps of the warm-up
default SFT_BATCH_SIZE 64 cpu=8                 # demonstrations per step; on a CPU few: RL is to learn the rest
default STEPS 100 cpu=12                        # training steps
default LR "" cpu=2e-5                          # on a CPU; elsewhere the stack's
default MAX_PROMPT_LENGTH 4096 cpu=448          # tokens
default MAX_RESPONSE_LENGTH 1024 cpu=64         # tokens

cd "$(dirname "$0")" && exec make --no-print-directory -C ../.. "${STAGE:-train}" TASK="${PWD##*/}" ARGS="${*@Q}"
