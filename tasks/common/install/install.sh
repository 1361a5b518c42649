#!/usr/bin/env bash
# install.sh STACK VENV: make VENV with exactly the packages of the stack's list, and check them.
#
# The list is complete and hashed, so nothing is resolved (--no-deps --require-hashes); uv installs it, or pip where uv
# fails. The old VENV stays as VENV.before and comes back when anything fails. The mark, a copy of the list, comes last.
set -euo pipefail
unset PYTHONPATH PYTHONHOME # pip would find packages there, and not install them
STACK=$1 VENV=$2
HERE=${BASH_SOURCE[0]%/*}/../stacks/$STACK
LIST=$HERE/requirements.txt
LOG=artifacts/install.log
MARK=$VENV/.installed-$STACK
CPU_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
[[ $STACK == cpu ]] && PYTHONS=(3.11 3.12) || PYTHONS=(3.12)

fail() {
  echo "error: $1" >&2
  if [[ -s $LOG ]]; then
    tail -n 8 "$LOG" | sed 's/^/  | /' >&2
    echo "  log: $LOG" >&2
  fi
  exit 1
}

[[ -f $LIST ]] || fail "STACK=$STACK: has no package list; make an environment of your own and set PYTHON (docs/INSTALLATION.md)"
is_installed() { # the versions are the list's; other hashes alone are no reason to install again
  [[ -f $MARK ]] && cmp -s <(grep -v '^ ' "$LIST") <(grep -v '^ ' "$MARK")
}
if is_installed; then
  touch "$MARK"
  exit
fi
# One installation at a time: the second waits, and then often finds all installed. The lock ends with the processes.
exec 9>.venv.lock
if ! flock -n 9; then
  echo "waiting for another installation in this checkout"
  flock 9
  if is_installed; then exit; fi
fi
echo "install"
mkdir -p artifacts && : >"$LOG"
UV=$(command -v uv || true)
if [[ -n $UV ]] && ! "$UV" --version >/dev/null 2>&1; then UV=; fi

# ---- the Python

WANTED=${PYTHONS[*]} && WANTED=${WANTED// / or }
is_wanted() { # PYTHON: it runs, in a version that the stack takes
  local version
  version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) && [[ " ${PYTHONS[*]} " == *" $version "* ]]
}
BASE=${BASE_PYTHON:-}
if [[ -n $BASE ]]; then
  is_wanted "$BASE" ||
    fail "BASE_PYTHON=$BASE is $("$BASE" --version 2>/dev/null || echo "no Python"); STACK=$STACK needs Python $WANTED"
else
  for candidate in "${PYTHONS[@]/#/python}" python3 python; do
    if is_wanted "$candidate"; then BASE=$candidate && break; fi
  done
  [[ -n $BASE$UV ]] ||
    fail "STACK=$STACK needs Python $WANTED, found $(python3 --version 2>/dev/null || echo none); install it, or uv, which brings its own, or set BASE_PYTHON"
fi

# ---- the environment

undo() {
  rm -rf "$VENV" "$LISTS"
  if [[ -d $VENV.before ]]; then mv "$VENV.before" "$VENV"; fi
}
LISTS=$(mktemp -d)
if [[ -d $VENV.before ]]; then undo && mkdir "$LISTS"; fi # the last installation was killed
trap undo EXIT
if [[ -d $VENV ]]; then mv "$VENV" "$VENV.before"; fi
PYTHON=$VENV/bin/python
# venv brings pip, whose configuration names the user's indexes; Debian's Python may lack venv.
if [[ -z $BASE ]] || ! "$BASE" -m venv "$VENV" >>"$LOG" 2>&1; then
  [[ -n $UV ]] || fail "cannot make a virtual environment in $VENV (on Debian: apt install python3-venv)"
  "$UV" venv --quiet --clear --seed --python "${BASE:-${PYTHONS[-1]}}" "$VENV" >>"$LOG" 2>&1 ||
    fail "uv cannot make an environment of Python $WANTED; install that Python, or set BASE_PYTHON"
fi

# ---- the packages

# NAME ERROR COMMAND ...: run the command, with a dot every five seconds. An empty ERROR leaves the message to the caller.
step() {
  local name=$1 error=$2 seconds=0
  printf '  %s ' "$name"
  "${@:3}" >>"$LOG" 2>&1 &
  local pid=$!
  trap 'kill $pid 2>/dev/null; exit 130' INT TERM
  while kill -0 $pid 2>/dev/null; do
    sleep 1
    seconds=$((seconds + 1))
    ((seconds % 5)) || printf .
  done
  trap - INT TERM
  wait $pid || {
    echo
    [[ -n $error ]] || return 1
    fail "$error"
  }
  echo " $seconds s"
}

only() { # NAME: its lines of the list
  awk -v name="$1==" '/^[^ ]/ { on = index($0, name) == 1 } on' "$LIST"
}
pip_setting() { # NAME: what PIP_SETTINGS has of it
  sed -nE "s/^[^=]*[.]$1='(.*)'\$/\1/p" <<<"$PIP_SETTINGS" | sed 's/\\n/ /g' | head -n 1
}
PIP=("$PYTHON" -m pip install --no-deps --no-input --disable-pip-version-check)
# pip looks at each version of each package, four times as long as uv takes in all. Without uv the list's comes first.
only uv >"$LISTS/uv.txt"
if [[ -z $UV && -s $LISTS/uv.txt ]] && "${PIP[@]}" --require-hashes -r "$LISTS/uv.txt" >>"$LOG" 2>&1; then
  UV=$VENV/bin/uv
fi
if [[ -n $UV ]]; then
  # Compiled, as pip does: where Python may not write beside a package (PYTHONDONTWRITEBYTECODE, an image), each process
  # of a training would compile all of verl and vLLM again, which doubles the time of its imports.
  INSTALL=("$UV" pip install --no-deps --compile-bytecode --python "$PYTHON")
  # uv does not read pip's configuration, so it gets pip's index, wheel folders and certificates. Not extra indexes: if
  # two indexes have a version, uv takes the files of one, which may not fit this machine.
  PIP_SETTINGS=$("$PYTHON" -m pip config list 2>/dev/null) # of its files and of the environment
  index=$(pip_setting index-url) wheels=$(pip_setting find-links) certificates=$(pip_setting cert)
  if [[ -z ${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-} && -n $index ]]; then export UV_DEFAULT_INDEX=$index; fi
  if [[ -n $(pip_setting no-index) ]]; then export UV_NO_INDEX=1; fi
  if [[ -z ${UV_FIND_LINKS:-} && -n $wheels ]]; then export UV_FIND_LINKS=${wheels// /,}; fi
  if [[ -z ${SSL_CERT_FILE:-} && -n $certificates ]]; then export SSL_CERT_FILE=$certificates; fi
fi

# PyPI has only CUDA builds of torch, and each index its own hash for the CPU build, so the list has none. It comes from
# where pip looks if that is a CPU build, else from PyTorch's index.
cpu_torch() {
  local build
  build=$("${PIP[@]}" --dry-run --ignore-installed --quiet --report - "$1" |
    "$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])') || build=
  echo "pip finds torch ${build:-nowhere}"
  if [[ $build == *+cpu ]]; then "${PIP[@]}" "$1"; else "${PIP[@]}" --index-url "$CPU_INDEX" "$1"; fi
}

SEPARATE='^$' TORCH=$(only torch)
if [[ -n $TORCH && $TORCH != *--hash=* ]]; then
  SEPARATE=torch==
  step "$TORCH, CPU build" "no CPU build of $TORCH; set TORCH_INDEX to an index that has it, or PIP_FIND_LINKS to a folder with its wheel" \
    cpu_torch "$TORCH"
elif [[ -n $(only flash-attn) ]]; then
  SEPARATE=flash-attn==
fi
awk -v name="$SEPARATE" '/^[^ ]/ { on = index($0, name) != 1 } on' "$LIST" >"$LISTS/most.txt"
MOST="$(grep -c '^[a-z0-9].*==' "$LISTS/most.txt") packages"
HASHED=(--require-hashes -r "$LISTS/most.txt")
# uv may not reach what pip does: an extra index, a proxy.
if [[ -z $UV ]] || ! step "$MOST, by uv" "" "${INSTALL[@]}" "${HASHED[@]}"; then
  INSTALL=("${PIP[@]}")
  step "$MOST, by pip" "installing $MOST failed" "${PIP[@]}" "${HASHED[@]}"
fi

# flash-attn's source fetches the wheel for this torch, or builds it: both need torch to be installed.
if [[ $SEPARATE == flash-attn== ]]; then
  if [[ -n ${FLASH_ATTN_WHEEL:-} ]]; then
    step flash-attn "FLASH_ATTN_WHEEL=$FLASH_ATTN_WHEEL: cannot be installed" "${INSTALL[@]}" "$FLASH_ATTN_WHEEL"
  else
    only flash-attn >"$LISTS/flash-attn.txt"
    NVCC=$(command -v nvcc || ls "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" 2>/dev/null || echo "not found")
    step flash-attn "flash-attn: its prebuilt wheel cannot be fetched from github.com/Dao-AILab/flash-attention/releases, and its build needs nvcc ($NVCC); set FLASH_ATTN_WHEEL to that wheel" \
      "${INSTALL[@]}" --require-hashes --no-build-isolation -r "$LISTS/flash-attn.txt"
  fi
fi
if [[ -f $HERE/after_install.py ]]; then
  "$PYTHON" "$HERE/after_install.py" >>"$LOG" 2>&1 || fail "$HERE/after_install.py failed"
fi
check() {
  PYTHONPATH=$(cd "${BASH_SOURCE[0]%/*}/../.." && pwd) "$PYTHON" -W ignore -m verl_tasks.install.check "$STACK" >"$LISTS/said.txt"
}
step "import and check" "" check || {
  cat "$LISTS/said.txt"
  fail "$(sed -n 's/^error: //p' "$LOG" | tail -n 1 | grep . || echo "what is installed does not work")"
}
cat "$LISTS/said.txt"
cp "$LIST" "$MARK"
trap - EXIT
rm -rf "$VENV.before" "$LISTS"
