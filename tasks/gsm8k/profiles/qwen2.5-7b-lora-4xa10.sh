# shellcheck shell=bash
# Qwen2.5-7B-Instruct with a LoRA adapter, on 4 x A10 (24 GB), of which one does not hold the base in fp32; 1,024 + 4,096
# tokens, on a100 + 3,584.
default MODEL Qwen/Qwen2.5-7B-Instruct
default N_GPUS 4 # the frozen base, 31 GB in fp32, is 8 GB on each
default LORA_RANK 32 # all weights do not fit on these GPUs
default LORA_ALPHA 64 # twice the rank
default LR 1e-5 # ten times that of all weights
default TP 4 # 15 GB of weights would leave little of one GPU for keys and values
default OFFLOAD 1 # the base on each GPU is vLLM's while it samples
default GPU_MEMORY_UTILIZATION 0.8 # nothing else is there
default TRAIN_BATCH_SIZE 32 # 256 responses a step
default ROLLOUT_N 8 # the group that a response is compared with
default MAX_TOKENS_PER_GPU 5120 # the longest sequence
default MICRO_BATCH_SIZE 1 # the same in SFT on a100
default MAX_PROMPT_LENGTH 1024 # prompts with examples or a long instruction
default MAX_RESPONSE_LENGTH 4096 a100=3584 # a chain of thought; a warm-up on a100 has no room for 5,120 tokens' logits
