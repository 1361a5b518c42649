#!/usr/bin/env bash
# The last line of every train.sh: run one stage (STAGE, default train) with the exported settings.
# Arguments are hydra overrides and go to verl after ours.
set -euo pipefail
export PYTHONPATH=$ROOT PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
if [[ ! -x $PYTHON ]]; then
  echo "error: $PYTHON: no such Python; run \`make install\` first" >&2
  exit 2
fi
exec "$PYTHON" -m tasks.common.launch "${STAGE:-train}" "$@"
