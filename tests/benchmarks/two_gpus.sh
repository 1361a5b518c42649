#!/usr/bin/env bash
# What takes two GPUs of one host: each PART writes artifacts/two_gpus/PART.json as it ends, all metrics of
# a training to NAME.metrics.jsonl, and its screen to PART.txt.
#
#   STACK=current bash tests/benchmarks/two_gpus.sh [PART ...]     default: all of PARTS, one after the other
#
#   sp        SP=2 beside SP=1: log-probs, entropies, gradients
#   engines   samples per second of evaluation with one engine on one GPU and two on two
#   dpo       4 DPO steps on one GPU and on two, in shards
#   tp        2 GRPO steps and the evaluation of the 3B shape, TP=2 and OFFLOAD=1; its result is its screen
#   sp16k     2 GRPO steps of the 3B shape with responses of 16,384 tokens, SP=2
#   scale1    the 3B shape on one GPU, 1,024 rollouts a step on the first GPU and 2,048 on the second at once
#   scale2    the 3B shape on two GPUs, 1,024 rollouts a step, then 2,048
#   scale     the efficiency, of the files of scale1 and scale2
#
# A part that fails does not stop the others. PYTHON=/some/python takes an environment of your own, MODEL=folder a model
# in place of the embedded one, PART_SECONDS another limit for each part than 1,200.
# shellcheck disable=SC2329 # the functions are called by their names
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
PARTS=(sp engines dpo tp sp16k scale1 scale2 scale)
export STACK=${STACK:?set STACK to current or a100} PYTHON=${PYTHON:-$PWD/.venv/bin/python} MODEL=${MODEL:-embedded}
OUT=${ARTIFACTS:-$PWD/artifacts}/two_gpus
RANDOM_3B=$OUT/random-qwen2.5-3b

start() { # FOLDER TARGET VARIABLE=value ...
  local folder=$1
  shift
  ARTIFACTS=$OUT/$folder "${MAKE:-make}" "$@" STACK="$STACK"
}
ours() { # two_gpus.py, with the variables of the stack
  ARTIFACTS=$OUT/work "$PYTHON" -m tests.benchmarks.two_gpus "$@"
}
EASY=(TASK=countdown SOURCE=generate DIFFICULTY=easy)

sp() { ours sp "$OUT/sp.json"; }
engines() {
  start work data "${EASY[@]}" MODEL="$MODEL" TEST_SIZE=512 TRAIN_SIZE=512 SFT_SIZE=0 DEV_SIZE=0 TEST_FREQ=0 N_GPUS=1 &&
    ours engines "$OUT/work/data/countdown/test.parquet" "$OUT/engines.json"
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
  start tp train "${EASY[@]}" MODEL="$RANDOM_3B" INIT=base TP=2 OFFLOAD=1 N_GPUS=2 STEPS=2 TRAIN_BATCH_SIZE=32 ROLLOUT_N=4 \
    TRAIN_SIZE=64 TEST_SIZE=64 DEV_SIZE=16 TEST_FREQ=1 MAX_PROMPT_LENGTH=128 MAX_RESPONSE_LENGTH=128 N=2 \
    GPU_MEMORY_UTILIZATION=0.4
}
step_3b() { # NAME VARIABLE=value ...: the times of its steps in NAME.json
  local name=$1
  shift
  start "$name" bench_training "${EASY[@]}" MODEL="$RANDOM_3B" TRAIN_SIZE=2048 TEST_SIZE=64 SFT_SIZE=0 DEV_SIZE=0 \
    TEST_FREQ=0 MAX_PROMPT_LENGTH=256 GPU_MEMORY_UTILIZATION=0.4 "$@"
}
figures() { # NAME STEPS
  echo "ARGS=--variants ours --steps $2 --out $OUT/$1.json"
}
sp16k() {
  step_3b sp16k N_GPUS=2 SP=2 MAX_RESPONSE_LENGTH=16384 MAX_TOKENS_PER_GPU=16384 TRAIN_BATCH_SIZE=8 ROLLOUT_N=4 \
    "$(figures sp16k 2)"
}
scale_step() { # GPUS PROMPTS
  local name=scale-$1gpu-$(($2 * 8))
  step_3b "$name" N_GPUS="$1" MAX_RESPONSE_LENGTH=256 TRAIN_BATCH_SIZE="$2" ROLLOUT_N=8 "$(figures "$name" 3)"
}
scale1() {
  local status=0 first second
  IFS=', ' read -r first second _ <<<"${CUDA_VISIBLE_DEVICES-0,1}"
  CUDA_VISIBLE_DEVICES=$first scale_step 1 128 &
  CUDA_VISIBLE_DEVICES=$second scale_step 1 256 || status=1
  wait $! || status=1
  return "$status"
}
scale2() { scale_step 2 128 && scale_step 2 256; }
scale() { ours scale "$OUT" "$OUT/scale.json"; }

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
  case $part in
    tp | sp16k | scale1 | scale2) [ -e "$RANDOM_3B/config.json" ] || ours model "$RANDOM_3B" >"$OUT/model.txt" 2>&1 ;;
  esac
  if timeout --kill-after=10 "${PART_SECONDS:-1200}" bash tests/benchmarks/two_gpus.sh --inside "$part" >"$OUT/$part.txt" 2>&1; then
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
