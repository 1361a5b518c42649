#!/usr/bin/env bash
# Countdown: reach a target with all the given numbers. Every value can be set from the environment:
#   make train TASK=countdown LR=2e-6 ROLLOUT_N=16 ARGS="trainer.total_epochs=1"
# Hardware without a GPU has smaller defaults: tasks/common/stacks/cpu.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch/defaults.sh"

# ---- model and data
MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct} # a hub id, a folder, or `embedded` (SmolLM2-135M-Instruct)
INIT=${INIT:-base}                         # train from `base`, or from an SFT warm-up (`sft`)
SOURCE=${SOURCE:-generate}                 # generate | hub (Jiayi-Pan/Countdown-Tasks-3to4) | a folder of that form
FILE=${FILE:-}                             # a data file or a folder of them; then the source
MAX_SAMPLES=${MAX_SAMPLES:-0}              # of a file or data set, before the split; 0: all
DIFFICULTY=${DIFFICULTY:-hard}             # easy: 2 numbers up to 99 | hard: 3 or 4
TRAIN_SIZE=${TRAIN_SIZE:-8192}
TEST_SIZE=${TEST_SIZE:-512}
DEV_SIZE=${DEV_SIZE:-128}                 # prompts for validation, of what would be training data; 0: none
SFT_SIZE=${SFT_SIZE:-2048}
SFT_SOURCE=${SFT_SOURCE:-task}             # demonstrations of the `task`, or right `samples` of MODEL
TRAIN_FILE=${TRAIN_FILE:-}                 # a parquet in place of train.parquet, e.g. the signal.parquet of a probe
PAIRS_FILE=${PAIRS_FILE:-}                 # dpo: parquet, json or jsonl of prompt, chosen, rejected; empty: of own samples
SAMPLED_PROMPTS=${SAMPLED_PROMPTS:-1024}   # training prompts sampled for SFT_SOURCE=samples and dpo; 0: all
SEED=${SEED:-42}
# ---- optimisation
METHOD=${METHOD:-grpo}                     # grpo | gspo | egpo | ppo | dpo
REWARD=${REWARD:-}                         # variant of the reward; this task has one
REWARD_MODEL=${REWARD_MODEL:-}             # a sequence classifier in place of the reward in training
STEPS=${STEPS:-100}
SELF_PLAY_ROUNDS=${SELF_PLAY_ROUNDS:-1}    # trainings of STEPS, each from, and held to, the result of the last
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}  # prompts a step
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-0}      # prompts an optimizer step; 0: as the method wants
LR=${LR:-1e-6}
CRITIC_LR=${CRITIC_LR:-1e-5}               # ppo
KL_COEF=${KL_COEF:-$([[ $SELF_PLAY_ROUNDS == 1 ]] && echo 0 || echo 0.01)} # weight of the KL to the start
EGPO_LAMBDA=${EGPO_LAMBDA:-0.4}            # egpo: weight of the entropy in the advantage
EGPO_ALPHA=${EGPO_ALPHA:-2.0}              # egpo: the entropy counts up to advantage / EGPO_ALPHA
DPO_BETA=${DPO_BETA:-0.1}                  # dpo: how strongly the policy is held to the start
SFT_STEPS=${SFT_STEPS:-64}
SFT_BATCH_SIZE=${SFT_BATCH_SIZE:-64}
SFT_LR=${SFT_LR:-1e-5}
# ---- rollouts and lengths
ROLLOUT_N=${ROLLOUT_N:-8}                  # samples a prompt
TEMPERATURE=${TEMPERATURE:-1.0}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-256}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-1024}
# ---- hardware
N_GPUS=${N_GPUS:-$(visible_gpus)}
NNODES=${NNODES:-1}                        # machines; more than one: a Ray cluster at RAY_ADDRESS (docs/MULTI_NODE.md)
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-32768} # in one forward pass, padding left out; 0: MICRO_BATCH_SIZE
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-16}   # dpo, MAX_TOKENS_PER_GPU=0: sequences a GPU in one forward pass
GPU_MEMORY_UTILIZATION=${GPU_MEMORY_UTILIZATION:-0.5}
# ---- LoRA (0: full fine-tuning)
LORA_RANK=${LORA_RANK:-0}
LORA_ALPHA=${LORA_ALPHA:-32}
# ---- evaluation: make eval, compare, probe, chat, batch
N=${N:-4}                                  # samples a prompt (probe: 16, batch: 1)
LIMIT=${LIMIT:-0}                          # the first so many prompts; 0: all (probe: 256)
GREEDY=${GREEDY:-1}                        # 1: also a greedy response a prompt
EVAL_TEMPERATURE=${EVAL_TEMPERATURE:-$TEMPERATURE} # 0: greedy, one response a prompt
TOP_P=${TOP_P:-1.0}
MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-$MAX_RESPONSE_LENGTH}
EVAL_SEED=${EVAL_SEED:-0}
# ---- run
RUN=${RUN:-}                               # name of the run; empty: made from the settings
SAVE_FREQ=${SAVE_FREQ:-20}
TEST_FREQ=${TEST_FREQ:-10}                 # steps between validations on the dev set, each with a checkpoint; 0: none
KEEP=${KEEP:-1}                            # best checkpoints by the dev set that stay besides the last one
PATIENCE=${PATIENCE:-0}                    # validations without a gain that end the training; 0: never
ABORT_ON=${ABORT_ON:-}                     # health rules that end the training, e.g. nan,collapse (docs/MONITORING.md)
WANDB=${WANDB:-0}                          # 1: also to Weights & Biases
LOGGER=${LOGGER:-}                         # more verl loggers beside console and file, e.g. tensorboard,mlflow

exec bash "$ROOT/tasks/common/launch/launch.sh" "$@"
