# shellcheck shell=bash
# Qwen2.5-32B-Instruct, all weights, on 8 x H200; 1,024 + 4,096 tokens. 8 GPUs of 80 GB do not hold it.
default MODEL Qwen/Qwen2.5-32B-Instruct
default N_GPUS 8 # its training state, 524 GB, is 66 GB on each
default TP 4 # 66 GB of weights on one GPU would be read for few sequences
default OFFLOAD 1 # 49 GB of weights and optimizer on each GPU are vLLM's while it samples
default GPU_MEMORY_UTILIZATION 0.8 # nothing else is there
default TRAIN_BATCH_SIZE 128 # 16 prompts a GPU
default ROLLOUT_N 8 # the group that a response is compared with
default MAX_TOKENS_PER_GPU 16384 # three of the longest sequences in a pass
default MICRO_BATCH_SIZE 2 # the same in SFT on a100
default MAX_PROMPT_LENGTH 1024 # prompts with examples or a long instruction
default MAX_RESPONSE_LENGTH 4096 # a chain of thought
