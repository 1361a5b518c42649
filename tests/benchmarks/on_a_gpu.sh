#!/usr/bin/env bash
# The runs behind the table in docs/GPU.md: every method and task with a small model on one GPU.
#
#   STACK=a100 bash tests/benchmarks/on_a_gpu.sh [RUN ...]     default: all that there are models for, one after the other
#
# Each run has a folder artifacts/on_a_gpu/STACK/RUN of its own, and its screen beside it in RUN.txt. A run that fails does
# not stop the others; the last lines say how each ended. PYTHON=/some/python takes an environment of your own.
# shellcheck disable=SC2329 # the functions are called by their names
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
RUNS=(learn gspo ppo egpo dpo lora resume gsm8k tool_calling econ_agent engines speed speed_3b speed_real kept kept_3b methods)
# With models that people use. MODELS is a folder with small and teacher, instruct models of one vocabulary; the large
# ones, random weights of a real shape, are written there.
REAL=(reinforce_pp distill reward_model own_samples judged self_play few_cpus resume_small)
LARGE=(qwen7b_lora llama8b_lora qwen14b_lora qwen7b qwen32b_lora) # the last two want two GPUs
STACK=${STACK:?set STACK to a100 or current}
OUT=${ARTIFACTS:-$PWD/artifacts}/on_a_gpu/$STACK

start() { # TARGET VARIABLE=value ...
  "${MAKE:-make}" "$1" STACK="$STACK" N_GPUS=1 "${@:2}"
}
EASY=(MODEL=embedded INIT=sft SOURCE=generate DIFFICULTY=easy SFT_SIZE=512 SFT_LR=3e-4)
LENGTHS=(MAX_PROMPT_LENGTH=128 MAX_RESPONSE_LENGTH=64)
COUNTDOWN=(TASK=countdown "${EASY[@]}" "${LENGTHS[@]}" SFT_STEPS=8 SFT_BATCH_SIZE=64 LR=1e-5)
SHORT=("${COUNTDOWN[@]}" TRAIN_SIZE=512 TEST_SIZE=64 STEPS=4 TRAIN_BATCH_SIZE=64 N=2)
OTHER=("${EASY[@]}" SFT_BATCH_SIZE=32 TRAIN_SIZE=512 TEST_SIZE=64 STEPS=4 TRAIN_BATCH_SIZE=32 N=2)
STEP=(TASK=countdown MODEL=embedded INIT=base SOURCE=generate DIFFICULTY=easy TRAIN_BATCH_SIZE=128 MAX_PROMPT_LENGTH=256 MAX_RESPONSE_LENGTH=256)

learn() { # docs/RESULTS.md, Learning
  start all "${COUNTDOWN[@]}" TRAIN_SIZE=8192 TEST_SIZE=1024 STEPS=20 TRAIN_BATCH_SIZE=256 MINI_BATCH_SIZE=64 SAVE_FREQ=12
}
gspo() {
  start train "${SHORT[@]}" METHOD=gspo &&
    start probe "${SHORT[@]}" METHOD=gspo LIMIT=64 &&
    printf '{"prompt": "Say hello"}\n{"prompt": "2+2?"}\n' >"$ARTIFACTS/in.jsonl" &&
    start batch TASK=countdown "${LENGTHS[@]}" INPUT="$ARTIFACTS/in.jsonl" OUTPUT="$ARTIFACTS/out.jsonl" &&
    printf 'hello\n/sample\n/sample\n/exit\n' | start chat TASK=countdown "${LENGTHS[@]}"
}
ppo() { start train "${SHORT[@]}" METHOD=ppo CRITIC_WARMUP=1; }
egpo() { start train "${SHORT[@]}" METHOD=egpo; }
dpo() { start dpo "${SHORT[@]}" TRAIN_BATCH_SIZE=16 SAMPLED_PROMPTS=128; }
lora() { start train "${SHORT[@]}" LORA_RANK=8 SFT_LR=1e-3 LR=1e-4; }
gsm8k() { start train TASK=gsm8k "${OTHER[@]}" SFT_STEPS=16 LR=3e-5 MAX_PROMPT_LENGTH=192 MAX_RESPONSE_LENGTH=96; }
tool_calling() {
  start train TASK=tool_calling "${OTHER[@]}" SFT_STEPS=16 LR=2e-5 MAX_PROMPT_LENGTH=448 MAX_RESPONSE_LENGTH=64
}
econ_agent() { # its default is LoRA
  local own=(SFT_STEPS=16 SFT_LR=1e-3 LR=1e-4 MAX_PROMPT_LENGTH=256 MAX_RESPONSE_LENGTH=48)
  start train TASK=econ_agent "${OTHER[@]}" "${own[@]}" &&
    start simulate TASK=econ_agent "${OTHER[@]}" "${own[@]}" MONTHS=3
}
resume() { # killed after step 3, in the second epoch of two steps; the same command then goes on with step 4
  killed_and_resumed 3 5 "${SHORT[@]}" TRAIN_SIZE=64 TRAIN_BATCH_SIZE=32 ROLLOUT_CORRECTION=token
}
killed_and_resumed() { # AFTER_STEP STEPS VARIABLE=value ...
  local after=$1 same=("${@:3}" STEPS="$2" SAVE_FREQ=1 RUN=resumed)
  local saved=$ARTIFACTS/runs/countdown/resumed/checkpoints/latest_checkpointed_iteration.txt
  set -m # the launcher and make in a process group of their own
  start train "${same[@]}" &
  local launcher=$!
  while kill -0 "$launcher" 2>/dev/null && ! grep -qs "^$after$" "$saved"; do sleep 1; done
  kill -9 -- "-$launcher"
  set +m
  echo "killed after step $(cat "$saved")"
  start train "${same[@]}"
}
engines() { # several on one GPU
  start data TASK=countdown MODEL=embedded "${EASY[@]:2}" TEST_SIZE=256 TRAIN_SIZE=512 SFT_SIZE=64 SFT_BATCH_SIZE=32 DEV_SIZE=0 TEST_FREQ=0 &&
    MODEL=embedded "${PYTHON:-.venv/bin/python}" -m tests.benchmarks.many_gpus shared \
      "$ARTIFACTS/data/countdown/test.parquet" "$OUT/engines.json"
}
peers=ours,trl,example # in one run, one after the other; a100 has an older TRL
[ "$STACK" = a100 ] && peers=ours,example
PEERS=${PEERS:-$peers}
speed() { start bench_training "${STEP[@]}" ARGS="--variants $PEERS,naive --steps 4 --out $OUT/speed.json"; }
speed_3b() { start bench_training "${STEP[@]}" ARGS="--random-3b --variants $PEERS --steps 3 --out $OUT/speed_3b.json"; }
speed_real() { # learned weights, which end their responses; FILE=<GSM8K's folder> has its own problems
  start bench_training TASK=gsm8k SOURCE=generate MODEL="${MODEL:-Qwen/Qwen2.5-Coder-1.5B-Instruct}" TRAIN_SIZE=1024 \
    TRAIN_BATCH_SIZE=128 MINI_BATCH_SIZE=128 MAX_PROMPT_LENGTH=256 MAX_RESPONSE_LENGTH=512 LR=3e-6 \
    ARGS="--variants $PEERS --steps 4 --out $OUT/speed_real.json"
}
KEPT=actor_rollout_ref.model.enable_gradient_checkpointing=False # all activations kept: nothing is computed twice
kept() { start bench_training "${STEP[@]}" ARGS="--variants ours --steps 4 --out $OUT/kept.json $KEPT"; }
kept_3b() { # 3,072 tokens a pass: about 5 MB of activations a token
  start bench_training "${STEP[@]}" MAX_TOKENS_PER_GPU=3072 \
    ARGS="--random-3b --variants ours --steps 3 --out $OUT/kept_3b.json $KEPT"
}
methods() { # the same warm-up and rollouts for each; a100 refuses three of them. JOBS: trainings at a time
  local all=grpo,dr_grpo,dapo,gspo,cispo,rloo,ppo,egpo
  [ "$STACK" = a100 ] && all=grpo,dr_grpo,gspo,rloo,ppo
  start experiment "${COUNTDOWN[@]}" TRAIN_SIZE=8192 TEST_SIZE=512 STEPS=16 TRAIN_BATCH_SIZE=64 TEST_FREQ=0 \
    METHODS="${METHODS:-$all}" SEEDS="${SEEDS:-3}" JOBS="${JOBS:-4}"
}

MODELS=${MODELS:-}
MODEL_OF_REAL=$MODELS/small
REAL_SIZE=(TASK=countdown DIFFICULTY=easy TRAIN_SIZE=512 TEST_SIZE=32 DEV_SIZE=16 TEST_FREQ=0 STEPS=3 TRAIN_BATCH_SIZE=16
  ROLLOUT_N=4 MINI_BATCH_SIZE=8 N=1 MAX_PROMPT_LENGTH=256 MAX_RESPONSE_LENGTH=256 MAX_TOKENS_PER_GPU=8192
  GPU_MEMORY_UTILIZATION="${SHARE:-0.5}")
SMALL=("${REAL_SIZE[@]}" MODEL="$MODEL_OF_REAL" INIT=base)
ADAPTER=(LORA_RANK=32 LORA_ALPHA=64)
reinforce_pp() { start train "${SMALL[@]}" METHOD=reinforce_pp; }
distill() { start train "${SMALL[@]}" METHOD=distill TEACHER="$MODELS/teacher"; }
reward_model() {
  "${PYTHON:-.venv/bin/python}" -m tests.benchmarks.random_model classifier "$MODEL_OF_REAL" "$MODELS/classifier" &&
    start train "${SMALL[@]}" REWARD_MODEL="$MODELS/classifier"
}
own_samples() { # LoRA: its checkpoints are small, as the disk may be
  start train "${SMALL[@]}" "${ADAPTER[@]}" SFT_LR=1e-4 INIT=sft SFT_SOURCE=samples SAMPLED_PROMPTS=128 SFT_BATCH_SIZE=8 SFT_STEPS=4
}
self_play() { start train "${SMALL[@]}" STEPS=2 SELF_PLAY_ROUNDS=2; }
few_cpus() { # a Ray of eight CPUs, of which a training would hold twelve
  start train "${SMALL[@]}" \
    ARGS="ray_kwargs.ray_init.num_cpus=8 transfer_queue.backend.SimpleStorage.num_data_storage_units=2"
}
resume_small() { killed_and_resumed 3 5 "${SMALL[@]}"; }
judged() { # the judge: MODELS/teacher, served by vLLM on the same GPU
  local port=8765 server
  "${PYTHON:-.venv/bin/python}" -m vllm.entrypoints.openai.api_server --model "$MODELS/teacher" --served-model-name judge \
    --host 127.0.0.1 --port "$port" --gpu-memory-utilization 0.15 --kv-cache-memory-bytes 2000000000 \
    --max-model-len 4096 --enforce-eager >"$ARTIFACTS/judge.txt" 2>&1 &
  server=$!
  until curl -sf "http://127.0.0.1:$port/v1/models" >/dev/null; do
    kill -0 "$server" || { echo "error: the judge ended: $ARTIFACTS/judge.txt" && return 1; }
    sleep 2
  done
  "${MAKE:-make}" new TASK=judged_on_a_gpu PYTHON="${PYTHON:-.venv/bin/python}" OPTIONS="reward=judge" &&
    JUDGE_URL=http://127.0.0.1:$port/v1 JUDGE_MODEL=judge start train "${SMALL[@]}" "${ADAPTER[@]}" TASK=judged_on_a_gpu TRAIN_SIZE=64 TEST_SIZE=8
  local code=$?
  kill "$server"
  rm -rf tasks/judged_on_a_gpu
  return "$code"
}

random() { "${PYTHON:-.venv/bin/python}" -m tests.benchmarks.random_model "$1" "$MODEL_OF_REAL" "$MODELS/$1"; } # SHAPE
large() { # SHAPE VARIABLE=value ...: what doctor estimates, then everything of `make all`
  local shape=$1 same=("${REAL_SIZE[@]}" STEPS=2 LIMIT=8 INIT=base MODEL="$MODELS/$1" "${@:2}")
  random "$shape" && start doctor "${same[@]}"
  start all "${same[@]}"
}
qwen7b_lora() { # killed after its first step, and gone on with
  local same=("${REAL_SIZE[@]}" LIMIT=8 INIT=base MODEL="$MODELS/qwen7b" "${ADAPTER[@]}")
  random qwen7b && start doctor "${same[@]}" STEPS=3
  killed_and_resumed 1 3 "${same[@]}"
}
llama8b_lora() { large llama8b "${ADAPTER[@]}"; }
qwen14b_lora() { large qwen14b "${ADAPTER[@]}"; }
# Without the optimizer's state in the checkpoint, which is for a resume alone: 61 GB less.
WEIGHTS="actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]"
qwen7b() { large qwen7b N_GPUS=2 KEEP=0 ARGS="$WEIGHTS"; }
qwen32b_lora() { large qwen32b N_GPUS=2 "${ADAPTER[@]}" TP=2 OFFLOAD=1; }
WITH_MODELS=("${REAL[@]}" "${LARGE[@]}")
[ -n "$MODELS" ] && RUNS+=("${WITH_MODELS[@]}")
[ $# -gt 0 ] || set -- "${RUNS[@]}"

for run; do
  if [[ " ${RUNS[*]} " == *" $run "* ]]; then continue; fi
  if [[ " ${WITH_MODELS[*]} " == *" $run "* ]]; then
    echo "error: $run: set MODELS to a folder with the models small and teacher" >&2
  else
    echo "error: $run: no such run; there are: ${RUNS[*]}" >&2
  fi
  exit 2
done
status=0
for run; do
  export ARTIFACTS=$OUT/$run
  mkdir -p "$ARTIFACTS"
  echo "$run: $OUT/$run.txt"
  SECONDS=0
  if "$run" >"$OUT/$run.txt" 2>&1; then
    echo "$run: done in $SECONDS s"
  else
    status=1
    echo "$run: failed after $SECONDS s: $(grep -m1 '^error:' "$OUT/$run.txt" || tail -n 1 "$OUT/$run.txt")"
  fi
done
exit $status
