# shellcheck shell=bash
# Sourced by every train.sh: `launch` runs the stage STAGE.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
TASK=$(basename "$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)")

default() { :; } # settings.py reads these lines of train.sh

launch() { # the arguments are hydra overrides and go to verl after ours
  local chosen=${STACK:-$(bash "$ROOT/tasks/common/install/choose_stack.sh")}
  STACK=${chosen%%:*}
  local venv=$ROOT/.venv-$STACK
  [[ -d $venv ]] || venv=$ROOT/.venv
  PYTHON=${PYTHON:-$venv/bin/python}
  if ! command -v "$PYTHON" >/dev/null; then # a path, or a name such as python3
    echo "error: $PYTHON: no such Python; run \`make install\` first" >&2
    exit 2
  fi
  unset PYTHONIOENCODING
  export TASK STACK PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONUTF8=1
  exec "$PYTHON" -m verl_tasks.launch.main "${STAGE:-train}" "$@"
}
