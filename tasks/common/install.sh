#!/usr/bin/env bash
# install.sh STACK VENV [PREFIX]: install exactly the packages of the stack's list into VENV.
#
# The list is complete, so pip resolves nothing (--no-deps). pip, not uv: indexes, certificates and folders of wheels
# are configured for pip on many machines, and uv does not read that configuration.
set -euo pipefail
STACK=$1 VENV=$2 PREFIX=${3:-}
HERE=tasks/common/stacks/$STACK
LIST=$HERE/requirements.txt
LOG=artifacts/install.log
CPU_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

fail() {
  echo "error: $1" >&2
  if [[ -s $LOG ]]; then
    tail -n 8 "$LOG" | sed 's/^/  | /' >&2
    echo "  log: $LOG" >&2
  fi
  exit 1
}

echo "${PREFIX}install"
mkdir -p artifacts && : >"$LOG"
if [[ ! -f $LIST ]]; then
  fail "STACK=$STACK: has no package list; install verl, vLLM and torch yourself and set PYTHON (docs/GPU.md)"
fi
BASE=${BASE_PYTHON:-$(command -v python3.11 || command -v python3.12 || command -v python3 || true)}
"$BASE" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null ||
  fail "Python 3.11 or 3.12 is needed, found: $("${BASE:-false}" --version 2>&1 || echo none); set BASE_PYTHON"
[[ -x $VENV/bin/python ]] || "$BASE" -m venv "$VENV" >>"$LOG" 2>&1 ||
  fail "cannot make a virtual environment in $VENV (on Debian: apt install python3-venv)"
PYTHON=$VENV/bin/python

# What runs, a dot for each five seconds of it.
step() {
  local name=$1
  shift
  printf '  %s ' "$name"
  "$@" >>"$LOG" 2>&1 &
  local pid=$! seconds=0
  trap 'kill $pid 2>/dev/null; exit 130' INT TERM
  while kill -0 $pid 2>/dev/null; do
    sleep 1
    seconds=$((seconds + 1))
    ((seconds % 5)) || printf .
  done
  trap - INT TERM
  wait $pid || {
    echo
    fail "installing $name failed"
  }
  echo " $seconds s"
}

PIP=("$PYTHON" -m pip install --no-deps --no-input --disable-pip-version-check)
TORCH=$(grep -E '^torch==' "$LIST")
step "$TORCH" "${PIP[@]}" "$TORCH"
if [[ $STACK == cpu && $("$PYTHON" -c 'import importlib.metadata as m; print(m.version("torch"))') != *+cpu ]]; then
  # The default index has CUDA builds only: take the CPU build from PyTorch's own index.
  step "$TORCH, CPU build" "${PIP[@]}" --force-reinstall --index-url "$CPU_INDEX" "$TORCH"
fi
step "$(grep -c == "$LIST") packages" "${PIP[@]}" -r "$LIST"
if [[ -f $HERE/after_install.py ]]; then
  "$PYTHON" "$HERE/after_install.py" >>"$LOG" 2>&1 || fail "$HERE/after_install.py failed"
fi
step "import of all of it" env PYTHONPATH=. "$PYTHON" -c 'import verl.trainer.main_ppo, verl.workers.rollout.vllm_rollout.vllm_async_server; from vllm import LLM'
