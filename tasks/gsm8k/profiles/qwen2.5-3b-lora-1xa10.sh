# shellcheck shell=bash
# Qwen2.5-3B-Instruct with a LoRA adapter, on one A10 (24 GB); 1,024 + 4,096 tokens, on a100 + 2,048.
default MODEL Qwen/Qwen2.5-3B-Instruct # of 7B the frozen base alone, in fp32, is 31 GB
default N_GPUS 1
default LORA_RANK 32 # all weights would take 49 GB
default LORA_ALPHA 64 # twice the rank
default LR 1e-5 # ten times that of all weights
default OFFLOAD 1 # the base, 12 GB in fp32, makes room for vLLM while it samples
default GPU_MEMORY_UTILIZATION 0.75 # nothing else is there
default TRAIN_BATCH_SIZE 16 # one small GPU samples 128 responses a step
default ROLLOUT_N 8 # the group that a response is compared with
default MAX_TOKENS_PER_GPU 5120 # the longest sequence
default MICRO_BATCH_SIZE 1 # the same in SFT on a100
default MAX_PROMPT_LENGTH 1024 # prompts with examples or a long instruction
default MAX_RESPONSE_LENGTH 4096 a100=2048 # a chain of thought; a warm-up on a100 has no room for 5,120 tokens' logits
