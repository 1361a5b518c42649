# shellcheck shell=bash
# Qwen2.5-7B-Instruct, all weights, on 8 x A100-80G; 1,024 + 4,096 tokens.
default MODEL Qwen/Qwen2.5-7B-Instruct
default N_GPUS 8 # its training state, 122 GB, is 15 GB on each
default GPU_MEMORY_UTILIZATION 0.6 # two thirds of it is room for keys and values
default TRAIN_BATCH_SIZE 128 # 16 prompts a GPU
default ROLLOUT_N 8 # the group that a response is compared with
default MAX_TOKENS_PER_GPU 24576 # four of the longest sequences in a pass
default MICRO_BATCH_SIZE 4 # the same in SFT on a100
default MAX_PROMPT_LENGTH 1024 # prompts with examples or a long instruction
default MAX_RESPONSE_LENGTH 4096 # a chain of thought
