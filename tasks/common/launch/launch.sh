#!/usr/bin/env bash
# The last line of every train.sh: run one stage (STAGE, default train) with the exported settings.
# Arguments are hydra overrides and go to verl after ours.
set -euo pipefail
if [[ ${STAGE:-} == count ]]; then # of `make train`: install, data, model, (sft), train, eval; all: merge, compare
  steps=$([[ ${GOAL:-train} == all ]] && echo 7 || echo 5)
  [[ $INIT == sft ]] && echo $((steps + 1)) || echo "$steps"
  exit
elif [[ ${STAGE:-} == default_model ]]; then
  echo "$MODEL"
  exit
elif [[ ${STAGE:-} == environment ]]; then # what a stage would get (tasks/common/runs/repeat.py)
  env -0
  exit
fi
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
VENV=$ROOT/.venv-$STACK
[[ -d $VENV ]] || VENV=$ROOT/.venv
PYTHON=${PYTHON:-$VENV/bin/python}
if [[ ! -x $PYTHON ]]; then
  echo "error: $PYTHON: no such Python; run \`make install\` first" >&2
  exit 2
fi
case ${STAGE:-} in
  bench) exec "$PYTHON" "$ROOT/tests/benchmarks/sampling.py" "$@" ;;
  bench_training) exec "$PYTHON" "$ROOT/tests/benchmarks/training.py" "$@" ;;
esac
exec "$PYTHON" -m tasks.common.launch.main "${STAGE:-train}" "$@"
