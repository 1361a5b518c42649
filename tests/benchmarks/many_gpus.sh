#!/usr/bin/env bash
# What takes several GPUs of one host: each PART writes artifacts/many_gpus/PART.json as it ends, all metrics of
# a training to NAME.metrics.jsonl, and its screen to PART.txt.
#
#   STACK=current GPUS="1 2 4" bash tests/benchmarks/many_gpus.sh [PART ...]     default: all of PARTS, one after the other
#
#   sp        SP=2 beside SP=1: log-probs, entropies, gradients
#   engines   samples per second of evaluation with one engine on one GPU and one on each of the most of GPUS
#   dpo       4 DPO steps on one GPU and on two, in shards
#   tp        2 GRPO steps and the evaluation of the 3B shape, TP=2 and OFFLOAD=1; its result is its screen
#   sp16k     2 GRPO steps of the 3B shape with responses of 16,384 tokens, SP=2
#   scale     GRPO steps of the 3B shape on each number of GPUS, 1,024 and 2,048 rollouts a step; the efficiency
#   scale_7b  the same of the 7B shape, 1,024 rollouts, from two GPUs on: one does not hold its training
#   lora_32b  2 GRPO steps of LoRA of the 32B shape, TP=2 and OFFLOAD=1, on the most of GPUS
#   killed    one rank of a training on the most of GPUS is killed: how long until it ends, what is left, and resumed
#   gsm8k     the recipe gpu-gsm8k on the most of GPUS: FILE=<GSM8K's folder> and MODEL=<a 1.5B>
#
# A part that fails does not stop the others. PYTHON=/some/python takes an environment of your own, MODEL=folder a model
# in place of the embedded one, PART_SECONDS another limit for each part than 1,200.
# shellcheck disable=SC2329 # the functions are called by their names
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
PARTS=(sp engines dpo tp sp16k scale scale_7b lora_32b killed gsm8k)
read -ra COUNTS <<<"${GPUS:-1 2}"
MOST=${COUNTS[-1]}
export STACK=${STACK:?set STACK to current or a100} PYTHON=${PYTHON:-$PWD/.venv/bin/python} MODEL=${MODEL:-embedded}
OUT=${ARTIFACTS:-$PWD/artifacts}/many_gpus

start() { # FOLDER TARGET VARIABLE=value ...
  local folder=$1
  shift
  ARTIFACTS=$OUT/$folder "${MAKE:-make}" "$@" STACK="$STACK"
}
ours() { # many_gpus.py, with the variables of the stack
  ARTIFACTS=$OUT/work "$PYTHON" -m tests.benchmarks.many_gpus "$@"
}
EASY=(TASK=countdown INIT=base SOURCE=generate DIFFICULTY=easy)

sp() { ours sp "$OUT/sp.json"; }
engines() {
  start work data "${EASY[@]}" MODEL="$MODEL" TEST_SIZE=512 TRAIN_SIZE=512 SFT_SIZE=0 DEV_SIZE=0 TEST_FREQ=0 N_GPUS=1 &&
    ours engines "$MOST" "$OUT/work/data/countdown/test.parquet" "$OUT/engines.json"
}
dpo() {
  local same=("${EASY[@]}" MODEL="$MODEL" INIT=sft SFT_SIZE=512 SFT_STEPS=8 SFT_BATCH_SIZE=64 SFT_LR=3e-4 LR=1e-5
    TRAIN_SIZE=512 TEST_SIZE=32 DEV_SIZE=0 TEST_FREQ=0 N=1 GREEDY=0 MAX_PROMPT_LENGTH=128 MAX_RESPONSE_LENGTH=64
    TRAIN_BATCH_SIZE=16 SAMPLED_PROMPTS=128)
  start dpo dpo "${same[@]}" RUN=shards N_GPUS=2 &&
    start dpo dpo "${same[@]}" RUN=whole N_GPUS=1 FROM=train PAIRS_FILE="$OUT/dpo/runs/countdown/shards/pairs.parquet" &&
    ours dpo "$OUT/dpo/runs/countdown" "$OUT/dpo.json"
}
tp() {
  random qwen3b && start tp train "${EASY[@]}" MODEL="$OUT/qwen3b" INIT=base TP=2 OFFLOAD=1 N_GPUS=2 STEPS=2 TRAIN_BATCH_SIZE=32 ROLLOUT_N=4 \
    TRAIN_SIZE=64 TEST_SIZE=64 DEV_SIZE=16 TEST_FREQ=1 MAX_PROMPT_LENGTH=128 MAX_RESPONSE_LENGTH=128 N=2 \
    GPU_MEMORY_UTILIZATION=0.4
}
random() { "$PYTHON" -m tests.benchmarks.random_model "$1" "$MODEL" "$OUT/$1"; } # SHAPE
step() { # NAME STEPS VARIABLE=value ...: the times of its steps in NAME.json
  start "$1" bench_training "${EASY[@]}" TRAIN_SIZE=2048 TEST_SIZE=64 SFT_SIZE=0 DEV_SIZE=0 TEST_FREQ=0 \
    MAX_PROMPT_LENGTH=256 GPU_MEMORY_UTILIZATION=0.4 "${@:3}" ARGS="--variants ours --steps $2 --out $OUT/$1.json"
}
sp16k() {
  random qwen3b &&
    step sp16k 2 MODEL="$OUT/qwen3b" N_GPUS=2 SP=2 MAX_RESPONSE_LENGTH=16384 MAX_TOKENS_PER_GPU=16384 TRAIN_BATCH_SIZE=8 ROLLOUT_N=4
}
scale() {
  local gpus prompts
  random qwen3b || return
  for gpus in "${COUNTS[@]}"; do
    for prompts in 128 256; do
      step "scale-$gpus-$((prompts * 8))" 3 MODEL="$OUT/qwen3b" N_GPUS="$gpus" MAX_RESPONSE_LENGTH=256 \
        TRAIN_BATCH_SIZE="$prompts" ROLLOUT_N=8 || return
    done
  done
  ours scale "$OUT" scale "$OUT/scale.json"
}
scale_7b() {
  local gpus
  random qwen7b || return
  for gpus in "${COUNTS[@]}"; do
    [ "$gpus" -eq 1 ] || step "scale_7b-$gpus-1024" 3 MODEL="$OUT/qwen7b" N_GPUS="$gpus" MAX_RESPONSE_LENGTH=256 \
      TRAIN_BATCH_SIZE=128 ROLLOUT_N=8 || return
  done
  ours scale "$OUT" scale_7b "$OUT/scale_7b.json"
}
lora_32b() {
  random qwen32b &&
    step lora_32b 2 MODEL="$OUT/qwen32b" N_GPUS="$MOST" TP=2 OFFLOAD=1 LORA_RANK=32 LORA_ALPHA=64 MAX_RESPONSE_LENGTH=256 \
      TRAIN_BATCH_SIZE=32 ROLLOUT_N=4
}
killed() {
  local same=("${EASY[@]}" MODEL="$MODEL" INIT=base N_GPUS="$MOST" STEPS=4 SAVE_FREQ=1 TRAIN_BATCH_SIZE=64 TRAIN_SIZE=512 TEST_SIZE=16
    DEV_SIZE=0 TEST_FREQ=0 N=1 MAX_PROMPT_LENGTH=128 MAX_RESPONSE_LENGTH=64 RUN=killed)
  local saved=$OUT/killed/runs/countdown/killed/checkpoints/latest_checkpointed_iteration.txt launcher rank code=0
  start killed train "${same[@]}" &
  launcher=$!
  until grep -qs '^1$' "$saved"; do kill -0 "$launcher" || return; sleep 1; done
  rank=$(pgrep -n -f 'ray::.*WorkerDict|ray::.*ActorRollout') && kill -9 "$rank" && SECONDS=0
  wait "$launcher" || code=$?
  echo "killed $rank: the command ended with $code after $SECONDS s; left on the GPUs: $(nvidia-smi --query-compute-apps=pid --format=csv,noheader | wc -l)"
  [ "$code" -ne 0 ] && start killed train "${same[@]}"
}
gsm8k() {
  start gsm8k all TASK=gsm8k SOURCE=hub MODEL="$MODEL" INIT=base N_GPUS="$MOST" STEPS=24 TRAIN_BATCH_SIZE=128 ROLLOUT_N=8 \
    MINI_BATCH_SIZE=64 LR=3e-6 TEST_FREQ=0 SAVE_FREQ=24 GREEDY=0 MAX_PROMPT_LENGTH=256 MAX_RESPONSE_LENGTH=512 ${FILE:+"FILE=$FILE"}
}

if [ "${1:-}" = --inside ]; then # in a process of its own, which timeout ends with all that it started
  "${@:2}"
  exit
fi
for part in "${@:-${PARTS[@]}}"; do
  if [[ " ${PARTS[*]} " != *" $part "* ]]; then
    echo "error: $part: no such part; there are: ${PARTS[*]}" >&2
    exit 2
  fi
done
mkdir -p "$OUT"
status=0
for part in "${@:-${PARTS[@]}}"; do
  echo "$part: $OUT/$part.txt"
  SECONDS=0
  if timeout --kill-after=10 "${PART_SECONDS:-1200}" bash tests/benchmarks/many_gpus.sh --inside "$part" >"$OUT/$part.txt" 2>&1; then
    echo "$part: done in $SECONDS s: $(tail -n 1 "$OUT/$part.txt")"
  else
    status=1
    echo "$part: failed after $SECONDS s: $(grep -m1 '^error:' "$OUT/$part.txt" || tail -n 1 "$OUT/$part.txt")"
  fi
  for file in "$OUT"/*/bench/*/ours/metrics/000.jsonl; do # also of a training that was ended
    name=${file#"$OUT"/}
    [ ! -e "$file" ] || cp "$file" "$OUT/${name%%/*}.metrics.jsonl"
  done
done
exit $status
