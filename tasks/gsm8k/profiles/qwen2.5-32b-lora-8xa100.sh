# shellcheck shell=bash
# Qwen2.5-32B-Instruct with a LoRA adapter, on 8 x A100-80G; 1,024 + 4,096 tokens.
default MODEL Qwen/Qwen2.5-32B-Instruct
default N_GPUS 8 # the frozen base, 131 GB in fp32, is 16 GB on each
default LORA_RANK 32 # all weights do not fit on these GPUs
default LORA_ALPHA 64 # twice the rank
default LR 1e-5 # ten times that of all weights
default TP 4 # 66 GB of weights do not leave room on one GPU
default OFFLOAD 1 # the base on each GPU is vLLM's while it samples
default GPU_MEMORY_UTILIZATION 0.8 # nothing else is there
default TRAIN_BATCH_SIZE 64 # 8 prompts a GPU; twice as many would take more than a day
default ROLLOUT_N 8 # the group that a response is compared with
default MAX_TOKENS_PER_GPU 16384 # three of the longest sequences in a pass
default MICRO_BATCH_SIZE 2 # the same in SFT on a100
default MAX_PROMPT_LENGTH 1024 # prompts with examples or a long instruction
default MAX_RESPONSE_LENGTH 4096 # a chain of thought
