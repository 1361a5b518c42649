"""On-policy distillation: the policy samples, TEACHER scores each token (Agarwal et al. 2023, arXiv 2306.13649).

The advantage of a token is the teacher's log-prob minus the policy's, a sample of the reverse KL (Lu 2025,
thinkingmachines.ai/blog/on-policy-distillation). The task's reward is measured, not learned.
"""

from pathlib import Path

from tasks.common.models.find import resolve_model
from tasks.common.models.merge import is_adapter
from tasks.common.settings import Settings, SettingsError
from tasks.common.text import one_line
from tasks.common.training.verl_config import quoted

DEFAULTS = {"KL_COEF": "0"}  # in rounds of self-play too
GPUS = 1  # of the teacher, beside those of the training

_TEACHER = "distillation.teacher_models.teacher_model"


def overrides(s: Settings) -> list[str]:
    """What distillation sets in verl's config. Raises SettingsError where TEACHER is no model."""
    return [
        "algorithm.adv_estimator=grpo",  # of the metrics alone
        "distillation.enabled=True",
        f"distillation.n_gpus_per_node={GPUS}",
        "distillation.nnodes=1",
        f"{_TEACHER}.model_path={quoted(_teacher(s))}",
        f"{_TEACHER}.inference.tensor_model_parallel_size={GPUS}",
        f"{_TEACHER}.inference.gpu_memory_utilization={s.GPU_MEMORY_UTILIZATION}",
        # verl gives it the prompt, the response and room for one token.
        f"{_TEACHER}.inference.max_model_len={s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH + 1}",
        f"{_TEACHER}.inference.free_cache_engine=False",  # its GPU is its own: it need not sleep
        f"+{_TEACHER}.inference.enable_sleep_mode=False",
        "distillation.distillation_loss.loss_mode=k1",
        "distillation.distillation_loss.use_policy_gradient=True",
        "distillation.distillation_loss.use_task_rewards=False",
    ]


def _teacher(s: Settings) -> str:
    """The folder or hub id of TEACHER; empty where none is set, which is a ``problem``."""
    if not s.TEACHER:
        return ""
    if is_adapter(Path(s.TEACHER).expanduser()):
        raise SettingsError(f"TEACHER={s.TEACHER}: is a LoRA adapter; merge it first (make merge MODEL=...)")
    try:
        return resolve_model(s.TEACHER)
    except SettingsError as error:
        raise SettingsError(str(error).replace("MODEL=", "TEACHER=", 1)) from None


def problem(config) -> str | None:
    """Why distillation cannot train with verl's composed ``config`` (a DictConfig), in one line; None where it can.

    Asks the hub for a hub id's tokenizer.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        return "KL_COEF: METHOD=distill is held to the teacher, not to the start; leave KL_COEF out"
    if rollout.temperature != 1:  # the teacher scores at 1 (verl/experimental/teacher_loop/teacher_manager.py)
        return f"TEMPERATURE={rollout.temperature}: METHOD=distill compares log-probs at TEMPERATURE=1; leave it out"
    teacher = config.distillation.teacher_models.teacher_model.model_path
    if not teacher:
        return "TEACHER is empty: METHOD=distill learns from a model; set its hub id or folder"
    policy = resolve_model(config.actor_rollout_ref.model.path)
    if _vocabulary(teacher, "TEACHER") != _vocabulary(policy, "MODEL"):
        return f"TEACHER={teacher}: has another tokenizer than MODEL={policy}; METHOD=distill compares their tokens"
    return None


def _vocabulary(model: str, name: str) -> dict[str, int]:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model).get_vocab()
    except Exception as error:
        raise SettingsError(f"{name}={model}: its tokenizer: {one_line(str(error), 200)}") from error
