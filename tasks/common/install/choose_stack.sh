#!/usr/bin/env bash
# Print the stack of this machine and why it is the one, e.g. "current: NVIDIA H200, compute capability 9.0".
#
# a100: flash-attn 2.8.1 and vLLM 0.11.0's FlashAttention 2 are built for 8.x. current: 9.0 and later.
set -euo pipefail
# A first entry that names no GPU hides all, as CUDA has it: empty, -1, NoDevFiles.
if [[ ! ${CUDA_VISIBLE_DEVICES-0} =~ ^\ *(\+?[0-9]|GPU-|MIG-) ]]; then
  echo "cpu: CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES hides all GPUs"
  exit
fi
limit="timeout --foreground 60" # seconds: ANSWERS_WITHIN of visible_gpus.py
timeout --foreground 1 true 2>/dev/null || limit="" # there is no timeout, or a simple one
smi() { $limit nvidia-smi "$@" 2>/dev/null; }
gpus() { # 124 where nvidia-smi does not answer
  smi ${1:+-i "$1"} --query-gpu=compute_cap,name --format=csv,noheader | grep -E '^[0-9]+\.[0-9]+, ' ||
    return $((PIPESTATUS[0] == 124 ? 124 : 1))
}

# The least of those that a training would see.
if found=$(gpus "${CUDA_VISIBLE_DEVICES:-}" || { (($? != 124)) || exit 124; gpus ""; }) &&
  found=$(sort -V <<<"$found" | head -n 1); then
  capability=${found%%,*}
  if ((${capability%.*} >= 9)); then stack=current; else stack=a100; fi
  echo "$stack: ${found#*, }, compute capability $capability"
elif (($? == 124)); then
  echo "cpu: nvidia-smi does not answer within 60 s; turn on persistence mode: nvidia-smi -pm 1"
elif smi -L >/dev/null; then
  echo "a100: an NVIDIA GPU, whose driver does not tell its compute capability"
else
  echo "cpu: no NVIDIA GPU"
fi
