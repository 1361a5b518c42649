# shellcheck shell=bash
# Qwen2.5-14B-Instruct, all weights, on 8 x A100-80G; 1,024 + 4,096 tokens.
default MODEL Qwen/Qwen2.5-14B-Instruct
default N_GPUS 8 # its training state, 236 GB, is 30 GB on each
default TP 2 # 30 GB of weights would leave little of one GPU for keys and values
default GPU_MEMORY_UTILIZATION 0.55 # 22 GB rest on each GPU while vLLM samples
default TRAIN_BATCH_SIZE 128 # 16 prompts a GPU
default ROLLOUT_N 8 # the group that a response is compared with
default MAX_TOKENS_PER_GPU 16384 # three of the longest sequences in a pass
default MICRO_BATCH_SIZE 2 # the same in SFT on a100
default MAX_PROMPT_LENGTH 1024 # prompts with examples or a long instruction
default MAX_RESPONSE_LENGTH 4096 # a chain of thought
