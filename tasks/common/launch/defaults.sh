# shellcheck shell=bash
# Sourced by every train.sh before its config block: where we are, and the defaults of the hardware at hand.
# Exports what it sets, and what the config block sets after it.
set -euo pipefail
visible_gpus() { # how many a training would see
  if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l
  else
    nvidia-smi -L | wc -l
  fi
}
lora_defaults() { # a default learning rate, as 1e-6: ten times as high where an adapter is trained
  if ((${LORA_RANK:-0} > 0)); then echo "${1%e*}e$((${1##*e} + 1))"; else echo "$1"; fi
}
set -a
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
TASK=$(basename "$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)")
MODEL_GIVEN=${MODEL:-} # before the defaults: `make compare MODEL=x` compares with x
case ${STAGE:-train} in
  probe | eval | compare | chat | batch) # a TEMPERATURE given to these is that of evaluation
    EVAL_TEMPERATURE=${EVAL_TEMPERATURE:-${TEMPERATURE:-}}
    unset TEMPERATURE
    ;;&
  probe) N=${N:-16} ;;
  dpo) METHOD=dpo ;;
  batch) N=${N:-1} ;;
esac
CHOSEN=${STACK:-$(bash "$ROOT/tasks/common/install/choose_stack.sh")}
STACK=${CHOSEN%%:*}
if [[ ! -f $ROOT/tasks/common/stacks/$STACK.sh ]]; then
  echo "error: STACK=$STACK: no such stack; there are: $(cd "$ROOT/tasks/common/stacks" && echo *.sh | sed 's/\.sh//g')" >&2
  exit 2
fi
if [[ -n ${PROFILE:-} ]]; then # values for a typical use, before those of the hardware
  PROFILES=$ROOT/tasks/$TASK/profiles
  if [[ ! -f $PROFILES/$PROFILE.sh ]]; then
    known=$(cd "$PROFILES" 2>/dev/null && echo *.sh | sed 's/\.sh//g') || known=none
    echo "error: PROFILE=$PROFILE: TASK=$TASK has no such profile; there are: $known" >&2
    exit 2
  fi
  # shellcheck source=/dev/null
  source "$PROFILES/$PROFILE.sh"
fi
# shellcheck source=/dev/null
source "$ROOT/tasks/common/stacks/$STACK.sh"
if [[ ${STAGE:-} == probe ]]; then LIMIT=${LIMIT:-256}; fi
