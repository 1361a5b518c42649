"""No GPU: verl 0.9.1 and vLLM on the CPU, a small embedded model, small batches, short lengths, no compilation.

Packages: requirements.txt. How verl and vLLM run on a CPU: verl_plugins/cpu.
"""

import os

from verl_tasks.machine.hardware import CPU_BLOCK_SIZE, cpu_dtype
from verl_tasks.settings import Settings, method
from verl_tasks.stacks import PADDED, WHOLE_RESPONSES

VERL = "0.9.1"

DEFAULTS = {
    "MODEL": "embedded",
    "INIT": "sft",
    "DIFFICULTY": "easy",
    "TRAIN_SIZE": "512",
    "TEST_SIZE": "128",
    "DEV_SIZE": "32",
    "SFT_SIZE": "512",
    "SAMPLED_PROMPTS": "128",
    "STEPS": "8",
    "TRAIN_BATCH_SIZE": "8",
    "ROLLOUT_N": "8",
    "CRITIC_WARMUP": "1",
    "LR": "1e-5",
    "SFT_STEPS": "8",
    "SFT_BATCH_SIZE": "32",
    "SFT_LR": "3e-4",
    "MAX_PROMPT_LENGTH": "128",
    "MAX_RESPONSE_LENGTH": "64",
    "N_GPUS": "1",
    "MAX_TOKENS_PER_GPU": "0",
    "SAVE_FREQ": "4",
    "TEST_FREQ": "0",  # 32 prompts and 8 steps would choose the best checkpoint by chance
    "N": "2",
}
FP8_PROBLEM = "is for GPUs; leave ROLLOUT_DTYPE out"

# What the trainers multiply in, and vLLM keeps and samples in.
DTYPE = cpu_dtype()

# In float32 all of countdown's test prompts would take as long as its training.
TESTED = {} if DTYPE == "bfloat16" else {"LIMIT": "64"}
STAGE_DEFAULTS = {"probe": {"LIMIT": "64"}} | dict.fromkeys(("train", "dpo", "all", "eval", "compare"), TESTED)

# verl and vLLM read these in every process.
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_tasks.verl_plugins.cpu.verl_platform,verl_tasks.verl_plugins.patches",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A process per evaluation engine would import everything again (10 s); only a GPU's memory needs its end.
    "EVAL_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    # An idle thread soon sleeps: spinning beside another program, it takes the core that the work needs.
    "GOMP_SPINCOUNT": "1000",
    # Huge pages: a micro-batch's logits are hundreds of MB, whose page faults cost about 15 %.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

# The module that runs verl's trainer: it and its processes as forks of one.
LAUNCHER = ["verl_tasks.verl_plugins.forked", "--trainer", "verl_tasks.verl_plugins.cpu.asleep"]

# Only a GPU's kernels can leave padding out. sdpa knows no soft caps (Gemma 2) and no sinks (gpt-oss).
PATHS = PADDED

STORAGE_UNITS = 1

# entropy_checkpointing: an update that measures the entropy (verl_plugins/on_policy.py) keeps nothing for a gradient.
RL_OVERRIDES = [
    "trainer.device=cpu",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "critic.strategy=fsdp2",
    "actor_rollout_ref.actor.entropy_checkpointing=True",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "critic.fsdp.use_torch_compile=False",
    f"+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={DTYPE}",
    f"+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype={DTYPE}",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    f"+critic.fsdp.mixed_precision.param_dtype={DTYPE}",
    "critic.model.enable_gradient_checkpointing=False",
    f"actor_rollout_ref.rollout.dtype={DTYPE}",
    f"reward.reward_model.rollout.dtype={DTYPE}",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.free_cache_engine=False",
    "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1024",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=verl_tasks.verl_plugins.cpu.kept_weights.CPUColocateWorkerExtension",
    f"+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size={CPU_BLOCK_SIZE}",
    WHOLE_RESPONSES,
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.model.lora.merge=True",
    "reward.num_workers=1",
    "reward.reward_model.rollout.free_cache_engine=False",
    "+reward.reward_model.rollout.enable_sleep_mode=False",
    f"transfer_queue.backend.SimpleStorage.num_data_storage_units={STORAGE_UNITS}",
    "data.dataloader_num_workers=0",
]
SFT_OVERRIDES = [
    "trainer.device=cpu",
    "engine.strategy=fsdp2",
    "engine.use_torch_compile=False",
    f"+engine.mixed_precision.param_dtype={DTYPE}",
    "model.enable_gradient_checkpointing=False",
    "data.num_workers=0",
]


def ray_overrides(s: Settings) -> list[str]:
    """Resources of a Ray that the training starts itself; a cluster has them from `ray start`."""
    gpus = s.N_GPUS + method(s.METHOD).GPUS
    return [f"+ray_kwargs.ray_init.num_gpus={gpus}", f"ray_kwargs.ray_init.num_cpus={16 * gpus}"]
