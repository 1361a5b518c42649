"""What verl would refuse of a composed config only once its engines are up, or would silently not do."""

from collections.abc import Iterator, Mapping
from itertools import chain

from verl_tasks.machine.memory import PROMPTS_ONCE
from verl_tasks.settings import SettingsError, batch_problems, token_problems

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
COUNTS = [f"data.{name}" for name in ("train_batch_size", "max_prompt_length", "max_response_length")]
COUNTS += ["trainer.n_gpus_per_node", "trainer.nnodes", "trainer.total_epochs", f"{ACTOR}.ppo_epochs"]
COUNTS += [f"{ROLLOUT}.{name}" for name in ("n", "prompt_length", "response_length", "val_kwargs.n", "max_num_seqs")]
COUNTS += [f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.agent.num_workers", f"{ROLLOUT}.max_model_len"]
COUNTS += [f"{ROLLOUT}.max_num_batched_tokens", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"]
COUNTS += [f"{ACTOR}.ppo_{name}" for name in ("mini_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu")]
ABOVE_0 = [f"{ROLLOUT}.temperature", f"{ACTOR}.grad_clip", f"{ACTOR}.optim.lr"]
SHARES = [f"{ROLLOUT}.{name}" for name in ("top_p", "val_kwargs.top_p", "gpu_memory_utilization")]


def check_composed(config) -> None:
    """Raise SettingsError for what of ``config`` ("ppo_trainer") verl would refuse late, or silently not do."""
    checks = (_not_ours, _out_of_range, _without_effect, _indivisible, _apart, _too_few_cpus)
    for problem in chain.from_iterable(each(config) for each in checks):
        raise SettingsError(problem)


def _not_ours(config) -> Iterator[str]:
    policy = config.actor_rollout_ref
    for name, group in (("actor", policy.actor), ("ref", policy.ref), ("critic", config.critic)):
        if group.strategy not in ("fsdp", "fsdp2"):
            yield f"ARGS: {name}.strategy={group.strategy}: all stacks train with FSDP; leave it out"
    if policy.rollout.name != "vllm":
        yield f"ARGS: rollout.name={policy.rollout.name}: all stacks sample with vLLM; leave it out"


def _too_few_cpus(config) -> Iterator[str]:
    """Ray's CPUs, where ARGS say how many: with fewer than a training holds (cluster.held_cpus) it waits for ever."""
    given = config.get("ray_kwargs", {}).get("ray_init", {}).get("num_cpus")
    if not given or "backend" not in config.get("transfer_queue", {}):  # verl 0.6.1 has none
        return
    units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes + samplers(config)
    teachers = config.distillation.n_gpus_per_node * config.distillation.nnodes if config.distillation.enabled else 0
    if given < (held := units + 1 + 3 * (gpus + teachers)):
        less = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
        fix = f"leave it out, or lower {less}={units}"
        yield f"ray_kwargs.ray_init.num_cpus={given}: a training holds {held} of Ray's CPUs, and would wait; {fix}"


def samplers(config) -> int:
    """GPUs of a composed ``config`` that only sample: verl's separate_async trainer without vLLM on the others."""
    policy = config.actor_rollout_ref
    return 0 if policy.hybrid_engine else policy.rollout.nnodes * policy.rollout.n_gpus_per_node


def _out_of_range(config) -> Iterator[str]:
    """Values that verl divides by, or by which it or vLLM ends late."""
    from omegaconf import OmegaConf

    counts = [*COUNTS, *(key for key, *_ in sequence_parallel(config))]
    for keys, wanted, holds in (
        (counts, "a whole number above 0", lambda value: isinstance(value, int) and value > 0),
        (ABOVE_0, "above 0", lambda value: value > 0),
        (SHARES, "above 0, at most 1", lambda value: 0 < value <= 1),
        ([f"{ROLLOUT}.val_kwargs.temperature"], "0 or above", lambda value: value >= 0),
    ):
        for key in keys:
            value = OmegaConf.select(config, key)
            if value is not None and not holds(value):  # ARGS may be null where verl's own are
                yield f"{key}={value}: must be {wanted}"


def sequence_parallel(config) -> list[tuple[str, int, Mapping]]:
    """The keys with the number of GPUs that share a sequence, that number, and the config of the model.

    In verl 0.9.1 the engine's own key counts where the other is 1; for the critic it alone counts.
    """
    policy, critic = config.actor_rollout_ref, config.critic
    groups = {
        "actor_rollout_ref.actor": (policy.actor, policy.model),
        "actor_rollout_ref.ref": (policy.ref, policy.model),
    }
    groups |= {f"{name}.fsdp_config": (group.fsdp_config, model) for name, (group, model) in groups.items()}
    groups["critic"] = critic, critic.model
    if "fsdp" in critic:  # verl 0.6.1 reads the critic's own key alone
        groups["critic.fsdp"] = critic.fsdp, critic.model
    key = "ulysses_sequence_parallel_size"
    return [(f"{name}.{key}", group[key], model) for name, (group, model) in groups.items()]


def _apart(config) -> Iterator[str]:
    """What keeps GPUs from sharing a sequence."""
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    for key, shared, model in sequence_parallel(config):
        if shared == 1:
            continue
        if gpus % shared:
            yield f"{key}={shared}: must divide N_GPUS x NNODES = {gpus}"
        if not model.use_remove_padding:  # verl/workers/engine/fsdp/transformer_impl.py
            yield f"{key}={shared}: is for sequences without padding; leave use_remove_padding on"
        # Only around these kernels the whole sequence is gathered; another attends within each slice, silently.
        attention = (model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
        if attention not in ("varlen", PROMPTS_ONCE, "flash_attention_2"):
            yield f"{key}={shared}: attn_implementation={attention} does not share a sequence; leave that out"


def _without_effect(config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    longest, wanted = rollout.max_model_len, rollout.prompt_length + rollout.response_length
    if longest and longest < wanted:
        name = f"rollout.max_model_len={longest}: cuts sequences of {wanted} tokens"
        yield f"{name}; set MAX_PROMPT_LENGTH and MAX_RESPONSE_LENGTH, not data.max_prompt_length and the like"
    kl, actor = config.algorithm.kl_ctrl.kl_coef, config.actor_rollout_ref.actor
    default = 0.001  # verl/trainer/config/ppo_trainer.yaml, both coefficients
    if not config.algorithm.use_kl_in_reward and kl not in (0, default):
        yield f"algorithm.kl_ctrl.kl_coef={kl:g}: does nothing without use_kl_in_reward; set KL_COEF"
    if not actor.use_kl_loss and actor.kl_loss_coef not in (0, default):
        yield f"actor.kl_loss_coef={actor.kl_loss_coef:g}: does nothing without use_kl_loss; set KL_COEF"
    correction, key = config.algorithm.get("rollout_correction") or {}, "algorithm.rollout_correction"
    given = [f"{name}={correction[name]}" for name in ("rollout_is", "rollout_rs") if correction.get(name)]
    bypass = ["bypass_mode=True"] if correction.get("bypass_mode") else []
    wanted = "actor_rollout_ref.rollout.calculate_log_probs=True"
    if not config.actor_rollout_ref.rollout.calculate_log_probs and (lost := given + bypass):
        yield f"{key}.{lost[0]}: does nothing without {wanted}; leave that on"
    # verl then takes the engine's log-probs for the old ones, and computes no weights.
    if given and bypass and not correction.get("use_policy_gradient"):
        yield f"{key}.bypass_mode=True: {given[0]} then does nothing; set ROLLOUT_CORRECTION=none with it"


def _indivisible(config) -> Iterator[str]:
    """What verl would refuse of the batch sizes once its engines are up, or leave out silently."""
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    gpus, parallel = trainer.n_gpus_per_node * trainer.nnodes, rollout.tensor_model_parallel_size
    prompts, mini_prompts = config.data.train_batch_size, actor.ppo_mini_batch_size
    if sampling := samplers(config):
        if sampling % parallel:  # verl/workers/rollout/llm_server.py would leave GPUs out
            yield f"rollout.tensor_model_parallel_size={parallel}: must divide ROLLOUT_GPUS = {sampling}"
    elif gpus % parallel:  # verl/workers/engine_workers.py, init_model
        yield f"rollout.tensor_model_parallel_size={parallel}: must divide N_GPUS x NNODES = {gpus}"
    yield from batch_problems(prompts, mini_prompts, rollout.n, trainer.n_gpus_per_node, trainer.nnodes)
    if actor.use_dynamic_bsz:
        lengths = config.data.max_prompt_length, config.data.max_response_length
        yield from token_problems(actor.ppo_max_token_len_per_gpu, actor.ulysses_sequence_parallel_size, *lengths)
        return
    # verl/workers/engine/utils.py, prepare_micro_batches
    micro, log_prob = actor.ppo_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size_per_gpu
    if micro and (mini := mini_prompts * rollout.n // gpus) % micro:
        yield f"actor.ppo_micro_batch_size_per_gpu={micro}: must divide a GPU's mini-batch, {mini}"
    if log_prob and (batch := prompts * rollout.n // gpus) % log_prob:
        yield f"rollout.log_prob_micro_batch_size_per_gpu={log_prob}: must divide a GPU's batch, {batch}"
