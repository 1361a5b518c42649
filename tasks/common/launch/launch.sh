# shellcheck shell=bash
# Sourced by every train.sh. `default` notes a value of its config block, `launch` starts the stage STAGE.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
TASK=$(basename "$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)")
CHOSEN=${STACK:-$(bash "$ROOT/tasks/common/install/choose_stack.sh")}
STACK=${CHOSEN%%:*}
DEFAULTS="" LEVEL=profile

default() { # default NAME VALUE [STACK=VALUE ...]: what this task wants, and on a stack. settings.py reads the lines.
  DEFAULTS+="$LEVEL $1 ${2-}"$'\n'
  local own
  for own in "${@:3}"; do DEFAULTS+="$LEVEL@${own%%=*} $1 ${own#*=}"$'\n'; done
}

if [[ -n ${PROFILE:-} ]]; then
  PROFILES=$ROOT/tasks/$TASK/profiles
  if [[ ! -f $PROFILES/$PROFILE.sh ]]; then
    known=$(cd "$PROFILES" 2>/dev/null && echo *.sh | sed 's/\.sh//g') || known=none
    echo "error: PROFILE=$PROFILE: TASK=$TASK has no such profile; there are: $known" >&2
    exit 2
  fi
  # shellcheck source=/dev/null
  source "$PROFILES/$PROFILE.sh"
fi
LEVEL=task

launch() { # the arguments are hydra overrides and go to verl after ours
  local venv=$ROOT/.venv-$STACK
  [[ -d $venv ]] || venv=$ROOT/.venv
  PYTHON=${PYTHON:-$venv/bin/python}
  if [[ ! -x $PYTHON ]]; then
    echo "error: $PYTHON: no such Python; run \`make install\` first" >&2
    exit 2
  fi
  export TASK STACK DEFAULTS PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
  exec "$PYTHON" -m tasks.common.launch.main "${STAGE:-train}" "$@"
}
