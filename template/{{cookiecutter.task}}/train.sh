{% macro line(name, default, comment) %}
{{ ("%s=${%s:-%s}" % (name, name, default)).ljust(42) }} # {{ comment }}
{%- endmacro %}
#!/usr/bin/env bash
# {{ cookiecutter.description }}. Every value can be set from the environment:
#   make train TASK={{ cookiecutter.task }} LR=2e-6 ROLLOUT_N=16 ARGS="trainer.total_epochs=1"
# Hardware without a GPU has smaller defaults: tasks/common/stacks/cpu.sh.
{% set small = {"tool_call": (256, 64)}.get(cookiecutter.reward) %}
{% if cookiecutter.source == "reasoning_gym" %}
{% set small = cookiecutter.env | lengths(cookiecutter.config) %}
{% endif %}
{% if small %}
# Tokens on a machine without a GPU.
SMALL_PROMPT_LENGTH={{ small[0] }} SMALL_RESPONSE_LENGTH={{ small[1] or 256 }}
{% if not small[1] %}
INIT=${INIT:-base} # there too: the environment gives no worked answers for an SFT warm-up
{% endif %}
{% endif %}
{% if cookiecutter.lora == "yes" %}
# An adapter's learning rates on a machine without a GPU.
SMALL_SFT_STEPS=12 SMALL_SFT_LR=2e-3 SMALL_LR=2e-4
{% endif %}
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch/defaults.sh"

# ---- model and data
{{ line("MODEL", cookiecutter.model, "a hub id, a folder, or `embedded` (SmolLM2-135M-Instruct)") }}
INIT=${INIT:-base}                         # train from `base`, or from an SFT warm-up (`sft`)
{{ line("SOURCE", cookiecutter.source, "hub, or a local folder of its form" if cookiecutter.source == "hub" else "a name that prepare_data.py knows") }}
{{ line("FILE", "$ROOT/tasks/" ~ cookiecutter.task ~ "/data.jsonl" if cookiecutter.source == "file" else "", "a data file, or a folder with train.* and test.*" if cookiecutter.source == "file" else "this task reads no files") }}
MAX_SAMPLES=${MAX_SAMPLES:-0}              # of a file or data set, before the split; 0: all
DIFFICULTY=${DIFFICULTY:-hard}             # {{ "easy | hard" if cookiecutter.source == "generate" else "of generated problems: not used here" }}
{% if cookiecutter.source in ("hub", "file") %}
TRAIN_SIZE=${TRAIN_SIZE:-0}                # 0: all
TEST_SIZE=${TEST_SIZE:-{{ "0.1" if cookiecutter.source == "file" else "512" }}}                # a count, a share below 1, or 0: all of a test split
{% else %}
TRAIN_SIZE=${TRAIN_SIZE:-8192}
TEST_SIZE=${TEST_SIZE:-512}
{% endif %}
DEV_SIZE=${DEV_SIZE:-128}                 # prompts for validation, of what would be training data; 0: none
SFT_SIZE=${SFT_SIZE:-2048}
SFT_SOURCE=${SFT_SOURCE:-task}             # demonstrations of the `task`, or right `samples` of MODEL
TRAIN_FILE=${TRAIN_FILE:-}                 # a parquet in place of train.parquet, e.g. the signal.parquet of a probe
PAIRS_FILE=${PAIRS_FILE:-}                 # dpo: parquet, json or jsonl of prompt, chosen, rejected; empty: of own samples
SAMPLED_PROMPTS=${SAMPLED_PROMPTS:-1024}   # training prompts sampled for SFT_SOURCE=samples and dpo; 0: all
SEED=${SEED:-42}
# ---- optimisation
METHOD=${METHOD:-{{ cookiecutter.method }}} # grpo | gspo | egpo | ppo | dpo
REWARD=${REWARD:-}                         # variant of the reward; this task has one
REWARD_MODEL=${REWARD_MODEL:-}             # a sequence classifier in place of the reward in training
STEPS=${STEPS:-100}
SELF_PLAY_ROUNDS=${SELF_PLAY_ROUNDS:-1}    # trainings of STEPS, each from, and held to, the result of the last
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}  # prompts a step
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-0}      # prompts an optimizer step; 0: as the method wants
LR=${LR:-{{ '1e-5' if cookiecutter.lora == 'yes' else '1e-6' }}}
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
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-{{ 256 if cookiecutter.source == "generate" and cookiecutter.reward != "tool_call" else [1024, 2 * (small or [0])[0]] | max }}}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-1024}
# ---- hardware
N_GPUS=${N_GPUS:-{{ "$(visible_gpus)" if cookiecutter.gpus == "all" else cookiecutter.gpus }}}
NNODES=${NNODES:-1}                        # machines; more than one: a Ray cluster at RAY_ADDRESS (docs/MULTI_NODE.md)
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-32768} # in one forward pass, padding left out; 0: MICRO_BATCH_SIZE
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-16}   # dpo, MAX_TOKENS_PER_GPU=0: sequences a GPU in one forward pass
GPU_MEMORY_UTILIZATION=${GPU_MEMORY_UTILIZATION:-0.5}
# ---- LoRA (0: full fine-tuning)
LORA_RANK=${LORA_RANK:-{{ 8 if cookiecutter.lora == 'yes' else 0 }}}
LORA_ALPHA=${LORA_ALPHA:-16}
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
