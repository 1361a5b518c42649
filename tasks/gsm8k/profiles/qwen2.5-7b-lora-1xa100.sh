# shellcheck shell=bash
# Qwen2.5-7B-Instruct with a LoRA adapter, on one A100-80G; 1,024 + 4,096 tokens.
default MODEL Qwen/Qwen2.5-7B-Instruct
default N_GPUS 1
default LORA_RANK 32 # all weights would take 122 GB
default LORA_ALPHA 64 # twice the rank
default LR 1e-5 # ten times that of all weights
default GPU_MEMORY_UTILIZATION 0.5 # the frozen base, 31 GB in fp32, stays beside vLLM
default TRAIN_BATCH_SIZE 32 # one GPU samples 256 responses a step
default ROLLOUT_N 8 # the group that a response is compared with
default MAX_TOKENS_PER_GPU 16384 # three of the longest sequences in a pass
default MICRO_BATCH_SIZE 2 # the same in SFT on a100
default MAX_PROMPT_LENGTH 1024 # prompts with examples or a long instruction
default MAX_RESPONSE_LENGTH 4096 # a chain of thought
