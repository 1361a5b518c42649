# shellcheck shell=bash
# The published countdown study's settings: Qwen3-4B, 64 prompts x 16, LR 2e-6, KL 0.01; on 8 x A100-80G.
default MODEL Qwen/Qwen3-4B # of the study
default TRAIN_BATCH_SIZE 64 # of the study
default ROLLOUT_N 16 # of the study
default LR 2e-6 # of the study
default KL_COEF 0.01 # of the study; the reference waits in RAM
default N_GPUS 8 # its training state, 64 GB, is 8 GB on each
default GPU_MEMORY_UTILIZATION 0.6 # two thirds of it is room for keys and values
default MAX_TOKENS_PER_GPU 24576 # four of the longest sequences in a pass
default MICRO_BATCH_SIZE 4 # the same in SFT on a100
default MAX_PROMPT_LENGTH 1024 # its template and the numbers need less
default MAX_RESPONSE_LENGTH 4096 # it thinks before it answers
default INIT base
default STEPS 100
