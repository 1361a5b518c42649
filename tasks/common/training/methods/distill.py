"""On-policy distillation: the policy samples, TEACHER scores each token (Agarwal et al. 2023, arXiv 2306.13649).

The advantage of a token is the teacher's log-prob minus the policy's, a sample of the reverse KL (Lu 2025,
thinkingmachines.ai/blog/on-policy-distillation). The task's reward is measured, not learned.
"""

import os

from verl_tasks.models.find import loaded, resolve_model, resolve_whole
from verl_tasks.settings import Settings
from verl_tasks.training.methods import grpo
from verl_tasks.training.verl_config import quoted

DEFAULTS = {"KL_COEF": "0"}  # in rounds of self-play too
REWARD, EPISODES, ASYNC = False, False, False
GPUS = 1  # of the teacher, beside those of the training
SHARE = 0.9  # of that GPU's memory, which the teachers of several trainings (SHARED_GPU) share
warning = grpo.warning

_TEACHER = "distillation.teacher_models.teacher_model"


def overrides(s: Settings) -> list[str]:
    """What distillation sets in verl's config. Raises SettingsError where TEACHER is no model."""
    teacher = resolve_whole("TEACHER", s.TEACHER) if s.TEACHER else ""  # empty: a ``problem``
    share = s.GPU_MEMORY_UTILIZATION if s.STACK == "cpu" else SHARE / int(os.environ.get("SHARED_GPU") or 1)
    return [
        "algorithm.adv_estimator=grpo",  # of the metrics alone
        "distillation.enabled=True",
        f"distillation.n_gpus_per_node={GPUS}",
        "distillation.nnodes=1",
        f"{_TEACHER}.model_path={quoted(teacher)}",
        f"{_TEACHER}.inference.tensor_model_parallel_size={GPUS}",
        f"{_TEACHER}.inference.gpu_memory_utilization={share}",
        # verl gives it the prompt, the response and room for one token.
        f"{_TEACHER}.inference.max_model_len={s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH + 1}",
        f"{_TEACHER}.inference.free_cache_engine=False",  # its GPU is its own: it need not sleep
        f"+{_TEACHER}.inference.enable_sleep_mode=False",
        "distillation.distillation_loss.loss_mode=k1",
        "distillation.distillation_loss.use_policy_gradient=True",
        "distillation.distillation_loss.use_task_rewards=False",
        # Its loss does not read the actor's.
        f"distillation.distillation_loss.clip_ratio_low={s.CLIP_LOW}",
        f"distillation.distillation_loss.clip_ratio_high={s.CLIP_HIGH}",
    ]


def problem(config) -> str | None:
    """Why distillation cannot train with verl's composed ``config`` (a DictConfig), in one line; None where it can."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        return "KL_COEF: METHOD=distill is held to the teacher, not to the start; leave KL_COEF out"
    if rollout.temperature != 1:  # the teacher scores at 1 (verl/experimental/teacher_loop/teacher_manager.py)
        return f"TEMPERATURE={rollout.temperature}: METHOD=distill compares log-probs at TEMPERATURE=1; leave it out"
    if not config.distillation.teacher_models.teacher_model.model_path:
        return "TEACHER is empty: METHOD=distill learns from a model; set its hub id or folder"
    return None


def models_problem(config) -> str | None:
    """Why TEACHER cannot teach MODEL, in one line; None where it can. Asks the hub for a hub id's tokenizer."""
    from transformers import AutoTokenizer

    teacher = config.distillation.teacher_models.teacher_model.model_path
    policy = resolve_model(config.actor_rollout_ref.model.path)
    vocabularies = [
        loaded(AutoTokenizer, "tokenizer", name, model).get_vocab()
        for name, model in (("TEACHER", teacher), ("MODEL", policy))
    ]
    if vocabularies[0] != vocabularies[1]:
        return f"TEACHER={teacher}: has another tokenizer than MODEL={policy}; METHOD=distill compares their tokens"
    return None
