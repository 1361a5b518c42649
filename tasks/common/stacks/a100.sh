# shellcheck shell=bash
# NVIDIA A100, verl 0.6.1 with vLLM 0.11.0, torch 2.8.0 and flash-attn 2.8.1.
