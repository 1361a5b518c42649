"""From our variables to verl's hydra keys: the mapping stands only here.

One list for each group of verl's config; the overrides of the stack come next, then the method's, last the user's. Ours
are in the names of verl 0.9.1, which verl_versions.py translates; the user's in those of the installed verl.
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from pathlib import Path

from tasks.common.machine import cluster, hardware
from tasks.common.machine.memory import GIB, Plan
from tasks.common.models import reward_model
from tasks.common.models.find import resolve_whole, whole_model
from tasks.common.models.merge import base_model, is_adapter
from tasks.common.settings import ROOT, Settings, SettingsError, batch_problems, method, stack, token_problems
from tasks.common.text import one_line
from tasks.common.training import parity, tracking, verl_versions

PLUGINS = ROOT / "tasks/common/verl_plugins"

TRAINED = ("actor_rollout_ref.actor.fsdp_config", "critic.fsdp")  # models with an optimizer
ENGINES = ("actor", "ref", "critic", "engine", "optim")  # groups of verl's config with a file for each engine

COUNTS = [f"data.{name}" for name in ("train_batch_size", "max_prompt_length", "max_response_length")]
COUNTS += [f"actor_rollout_ref.rollout.{name}" for name in ("n", "prompt_length", "response_length")]
COUNTS += ["actor_rollout_ref.rollout.tensor_model_parallel_size", "trainer.n_gpus_per_node", "trainer.nnodes"]
COUNTS += [f"actor_rollout_ref.actor.{name}" for name in ("ppo_mini_batch_size", "ppo_max_token_len_per_gpu")]
COUNTS_OR_NULL = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"]
COUNTS_OR_NULL += ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"]
COUNTS_OR_NULL += ["actor_rollout_ref.rollout.max_model_len"]

# No outputs/ folder of hydra's own; what it would log is in our log file.
VERLS_WORKERS = 8  # agent loops and rewards, each (verl/trainer/config)
HYDRA = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]

# ROLLOUT_CORRECTION: the log-probs of engine and trainer differ, so the samples are another policy's. `token` weights
# each token with their ratio, at most 2 (verl's preset decoupled_token_is); `sequence` also rejects responses with a
# mean k3 above 0.01 (decoupled_k3_rs_token_tis).
TOKEN = ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=2.0"]
SEQUENCE = [
    "algorithm.rollout_correction.rollout_rs=seq_mean_k3",
    "algorithm.rollout_correction.rollout_rs_threshold=0.01",
]
CORRECTIONS = {"none": [], "token": TOKEN, "sequence": [*TOKEN, *SEQUENCE]}


def quoted(path) -> str:
    """A value that hydra's override grammar takes as one text. Raises SettingsError for ``${``.

    The grammar reads backslashes as escapes only before a quote, so only those are doubled. verl resolves its config
    more than once, so an escaped reference would be followed at the second time.
    """
    if "${" in str(path):
        raise SettingsError(f"{one_line(str(path), 200)}: `${{` is a reference in verl's config; take another path")
    text = re.sub(r"(\\*)('|\Z)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), str(path))
    return f"'{text}'"


def micro_batch(limit: int, sequences: int) -> int:
    """The largest number of sequences up to ``limit`` that divides ``sequences``, as verl requires of micro-batches."""
    return max(size for size in range(1, limit + 1) if sequences % size == 0)


def _save_contents(s: Settings) -> str:
    """With hf_model a checkpoint has a folder that vLLM and transformers load; not for LoRA, where nothing loads it
    because its names are peft's (tasks/common/models/merge.py makes the adapter)."""
    return "[model,optimizer,extra]" if s.LORA_RANK else "[model,optimizer,extra,hf_model]"


def _trainer(s: Settings, run_dir: Path, steps: int) -> list[str]:
    """What the trainers of RL and SFT have in common."""
    return [
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1000000",  # the steps end the training
        f"trainer.n_gpus_per_node={s.N_GPUS}",
        f"trainer.project_name={quoted(tracking.project(s))}",
        f"trainer.experiment_name={quoted(run_dir.name)}",
        f"trainer.logger=[{','.join(['console', 'file', *tracking.loggers(s)])}]",
        f"trainer.default_local_dir={quoted(run_dir / 'checkpoints')}",
        f"trainer.save_freq={s.SAVE_FREQ}",
    ]


def _reward_model(s: Settings) -> list[str]:
    """A classifier behind a vLLM of its own, on the same GPUs; it sleeps while the policy samples and learns."""
    reward_model.check(s)
    path, context = resolve_whole("REWARD_MODEL", s.REWARD_MODEL), reward_model.context_length(s)
    return [
        "reward.reward_model.enable=True",
        f"reward.reward_model.model_path={quoted(path)}",
        "reward.reward_model.rollout.name=vllm",
        "reward.reward_model.rollout.tensor_model_parallel_size=1",
        f"reward.reward_model.rollout.gpu_memory_utilization={s.GPU_MEMORY_UTILIZATION}",
        f"reward.reward_model.rollout.prompt_length={s.MAX_PROMPT_LENGTH}",
        f"reward.reward_model.rollout.response_length={s.MAX_RESPONSE_LENGTH}",
        f"reward.reward_model.rollout.max_model_len={context}",
    ]


def _micro_batches(s: Settings) -> list[str]:
    """What a GPU takes in one pass: sequences up to a number of tokens, or a number of sequences.

    The rollout's and the reference model's log-probs, and the critic, follow the actor's.
    """
    if s.MAX_TOKENS_PER_GPU:
        return [
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={s.MAX_TOKENS_PER_GPU}",
        ]
    micro = micro_batch(s.MICRO_BATCH_SIZE, s.MINI_BATCH_SIZE * s.ROLLOUT_N // s.world_size)
    return [
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={micro}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={micro}",
    ]


def agent_loop(s: Settings) -> str:
    """The name of the agent loop that samples (verl_plugins/agent_loops.yaml)."""
    turns = "episode" if s.multi_turn else "single_turn"
    return f"{turns}_unless_truncated" if s.TRUNCATED == "masked" else f"{turns}_of_row"


def _truncated(s: Settings) -> list[str]:
    """What TRUNCATED does with a response that was cut off at MAX_RESPONSE_LENGTH.

    masked: none of its tokens counts in a loss. shaped: verl's soft overlong punishment (Yu et al. 2025, arXiv
    2503.14476, equation 13): from 0 at the start of a buffer, the last fifth as in the paper, to -1 at the limit.
    """
    chosen = [f"actor_rollout_ref.rollout.agent.default_agent_loop={agent_loop(s)}"]
    if s.TRUNCATED != "shaped":
        return chosen
    buffer = "+reward.reward_kwargs.overlong_buffer_cfg"
    return [
        *chosen,
        "reward.reward_manager.name=dapo",
        f"+reward.reward_kwargs.max_resp_len={s.MAX_RESPONSE_LENGTH}",
        f"{buffer}.enable=True",
        f"{buffer}.len={max(1, s.MAX_RESPONSE_LENGTH // 5)}",
        f"{buffer}.penalty_factor=1.0",
        f"{buffer}.log=False",  # the metric would be a tensor, which the file of metrics does not take
    ]


def _reward(s: Settings) -> list[str]:
    """What makes the rewards: of a multi-turn task its agent loop (verl_plugins/episode_loop.py)."""
    if s.multi_turn:
        turns = {"turns": s.MAX_TURNS, "turn_length": s.MAX_TURN_LENGTH, "step_seconds": s.STEP_SECONDS}
        return [f"+data.episode.{name}={value}" for name, value in ({"task": s.TASK} | turns).items()]
    if s.REWARD_MODEL:
        return _reward_model(s)
    # Not the old top-level key `custom_reward_function`: verl 0.9.1 accepts and ignores it.
    key = "reward.custom_reward_function"
    function = [f"{key}.path={quoted(s.task_dir / 'reward.py')}", f"{key}.name=compute_score"]
    return [*function, f"+{key}.reward_kwargs.variant={s.REWARD}"] if s.REWARD else function


def _ray(s: Settings) -> list[str]:
    """A Ray of this machine; nothing where Ray itself joins the one at RAY_ADDRESS. Raises SettingsError."""
    if cluster.address(s.NNODES):
        return []
    return ["+ray_kwargs.ray_init.include_dashboard=False", *getattr(stack(s.STACK), "ray_overrides", lambda s: [])(s)]


def sent_environment(environment: dict[str, str]) -> list[str]:
    """Overrides that bring ``environment`` to a cluster's workers, which else have that of `ray start` alone."""
    if not os.environ.get("RAY_ADDRESS"):
        return []
    sent = cluster.sent(environment).items()
    return [f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}={quoted(value)}" for name, value in sent]


def rl_overrides(s: Settings, model: Path | str, run_dir: Path) -> list[str]:
    """Overrides for ``verl.trainer.main_ppo``: train ``model`` for s.STEPS steps, writing to ``run_dir``.

    Where ``model`` is a LoRA adapter, it is trained on.
    """
    data = [
        f"data.train_files={quoted(s.train_file)}",
        # Not the test set, which is for the final evaluation. verl must have one, validating or not.
        f"data.val_files={quoted(s.data_dir / 'dev.parquet' if s.DEV_SIZE else s.train_file)}",
        f"data.train_batch_size={s.TRAIN_BATCH_SIZE}",
        f"data.max_prompt_length={s.MAX_PROMPT_LENGTH}",
        f"data.max_response_length={s.MAX_RESPONSE_LENGTH}",
        "data.filter_overlong_prompts=True",
        f"data.custom_cls.path={quoted(PLUGINS / 'dataset.py')}",
        "data.custom_cls.name=Prompts",
        f"data.seed={s.SEED}",
    ]
    model_ = [
        f"actor_rollout_ref.model.path={quoted(base_model(str(model)))}",
        f"actor_rollout_ref.model.lora_rank={s.LORA_RANK}",
        f"actor_rollout_ref.model.lora_alpha={s.LORA_ALPHA}",
    ]
    if is_adapter(Path(model)):
        model_ += [f"actor_rollout_ref.model.lora_adapter_path={quoted(model)}"]
    actor = [
        f"actor_rollout_ref.actor.optim.lr={s.LR}",
        f"actor_rollout_ref.actor.optim.lr_warmup_steps={s.LR_WARMUP}",
        f"actor_rollout_ref.actor.clip_ratio_low={s.CLIP_LOW}",
        f"actor_rollout_ref.actor.clip_ratio_high={s.CLIP_HIGH}",
        *(f"{engine}.{what}_offload={bool(s.OFFLOAD)}" for engine in TRAINED for what in ("param", "optimizer")),
        f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={s.SP}",
        f"critic.ulysses_sequence_parallel_size={s.SP}",  # which 0.9.1 hands on to the actor's engine alone
        f"critic.fsdp.ulysses_sequence_parallel_size={s.SP}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={s.MINI_BATCH_SIZE}",
        "actor_rollout_ref.actor.shuffle=True",  # the critic's too
        f"actor_rollout_ref.actor.checkpoint.save_contents={_save_contents(s)}",
        "actor_rollout_ref.actor.checkpoint.load_contents=[model,optimizer,extra]",
    ]
    rollout = [
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.n={s.ROLLOUT_N}",
        f"actor_rollout_ref.rollout.temperature={s.TEMPERATURE}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={s.TP}",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={s.GPU_MEMORY_UTILIZATION}",
        # Without it vLLM wants room for the model's whole window, and ends at the start where there is less.
        f"actor_rollout_ref.rollout.max_model_len={s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH}",
        f"actor_rollout_ref.rollout.seed={s.SEED}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={quoted(PLUGINS / 'agent_loops.yaml')}",
    ]
    trainer = [
        *_trainer(s, run_dir, s.STEPS),
        f"trainer.nnodes={s.NNODES}",
        f"trainer.rollout_data_dir={quoted(run_dir / 'rollouts')}",
        f"trainer.validation_data_dir={quoted(run_dir / 'validation')}",
        "trainer.max_actor_ckpt_to_keep=null",  # KEEP: runs/keep.py
        "trainer.v1.trainer_mode=task",  # tasks/common/verl_plugins/trainer.py
        "trainer.val_before_train=False",
        f"trainer.test_freq={s.TEST_FREQ or -1}",
    ]
    own = [*stack(s.STACK).OVERRIDES, *stack(s.STACK).RL_OVERRIDES]
    own += [*_pass(s, "actor_rollout_ref.model"), *_pass(s, "critic.model", head=False)]
    own += getattr(stack(s.STACK), "lora_overrides", lambda s: [])(s)
    method_ = [*_truncated(s), *method(s.METHOD).overrides(s)]
    rollout += CORRECTIONS[s.ROLLOUT_CORRECTION]
    if sharing := os.environ.get("SHARED_GPU"):  # by launch/experiments.py; each worker imports verl: 0.7 GB
        workers = verl_versions.workers(s, max(1, VERLS_WORKERS // int(sharing)))
        rollout += [f"actor_rollout_ref.rollout.agent.num_workers={workers}", f"reward.num_workers={workers}"]
    overrides = [*data, *model_, *actor, *_micro_batches(s), *rollout, *_reward(s), *trainer, *_ray(s), *own, *method_]
    return verl_versions.translated(overrides, "ppo_trainer", s)


def _pass(s: Settings, model: str, head: bool = True) -> list[str]:
    """How sequences pass through the ``model`` at that key (parity.py); ``head``: it gives log-probs, as a critic does
    not. Nothing for a stack that has one way alone."""
    if not (chosen := parity.path(s)):
        return []
    own = [f"+{model}.override_config.{name}={value}" for name, value in parity.model_config(s).items()]
    fused = [f"{model}.use_fused_kernels={chosen['fused']}"] if head else []
    return [*own, f"{model}.use_remove_padding={chosen['packed']}", *fused]


def critic_overrides(s: Settings, model: str) -> list[str]:
    """Where ``model`` is an adapter: a critic begins as the policy, not as its base. Merges the adapter."""
    if not is_adapter(Path(model)) or not any("critic.model.path=" in each for each in method(s.METHOD).overrides(s)):
        return []
    return [f"critic.model.path={quoted(whole_model(model))}"]


def sft_overrides(s: Settings, model: Path | str, run_dir: Path, demonstrations: Path) -> list[str]:
    """Overrides for ``verl.trainer.sft_trainer``: the warm-up on a parquet file of demonstrations."""
    data = [
        f"data.train_files={quoted(demonstrations)}",
        f"data.custom_cls.path={quoted(PLUGINS / 'dataset.py')}",
        "data.custom_cls.name=Demonstrations",
        f"data.train_batch_size={s.SFT_BATCH_SIZE}",
        f"data.max_length={s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH}",
        f"data.micro_batch_size_per_gpu={micro_batch(s.MICRO_BATCH_SIZE, s.SFT_BATCH_SIZE // s.N_GPUS)}",
        f"data.use_dynamic_bsz={s.MAX_TOKENS_PER_GPU > 0}",
    ]
    if s.MAX_TOKENS_PER_GPU:
        data += [f"data.max_token_len_per_gpu={s.MAX_TOKENS_PER_GPU}"]
    model_ = [f"model.path={quoted(model)}", f"model.lora_rank={s.LORA_RANK}", f"model.lora_alpha={s.LORA_ALPHA}"]
    optim = [f"optim.lr={s.SFT_LR}", "optim.lr_scheduler_type=cosine", "optim.lr_warmup_steps_ratio=0.1"]
    trainer = [
        *_trainer(s, run_dir, s.SFT_STEPS),
        f"trainer.seed={s.SEED}",
        "trainer.max_ckpt_to_keep=1",
        f"checkpoint.save_contents={_save_contents(s)}",
        "checkpoint.load_contents=[model,optimizer,extra]",
    ]
    own = [f"engine.ulysses_sequence_parallel_size={s.SP}", *stack(s.STACK).OVERRIDES, *stack(s.STACK).SFT_OVERRIDES]
    own += _pass(s, "model")
    return verl_versions.translated([*data, *model_, *optim, *trainer, *own], "sft_trainer_engine", s)


def compose(config_name: str, overrides: list[str], package: Path | None = None, arguments: Sequence[str] = ()):
    """verl's config ("ppo_trainer" or "sft_trainer_engine") under ``overrides``, strictly: an unknown key raises.

    ``arguments``: the user's overrides, after ours; each must have the type of the value that it replaces. Reads the
    yaml files of the folder ``package`` (default: the installed verl) without importing verl, which would load torch.
    Raises SettingsError.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if deletion := next((a for a in arguments if a.startswith("~")), ""):
        raise SettingsError(f"ARGS: {deletion}: verl reads its keys, so none is deleted; set a value or null instead")
    if engine := next(filter(_of_another_engine, arguments), ""):
        raise SettingsError(f"ARGS: {engine}: all stacks train with FSDP, verl's model_engine=dp; leave it out")
    package = package or Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    with initialize_config_dir(str(package / "trainer/config"), version_base=None):
        try:
            config = hydra_compose(config_name, [*overrides, *arguments])
            if arguments:
                _check_types(hydra_compose(config_name, overrides), config, arguments)
                OmegaConf.to_container(config, resolve=True)  # raises for a reference to nothing
            return config
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(f"verl's config refuses an override (ARGS?): {' '.join(str(error).split())}") from error


def rl_config(s: Settings, arguments: Sequence[str] = ()):
    """verl's config of an RL training from MODEL, checked. Raises SettingsError."""
    config = compose("ppo_trainer", rl_overrides(s, s.MODEL, s.runs_dir), arguments=arguments)
    check(config)
    if problem := getattr(stack(s.STACK), "SP_PROBLEM", ""):
        for key, shared, _ in _sequence_parallel(config):
            if shared > 1:
                raise SettingsError(f"{key}={shared}: {problem}")
    return config


def _of_another_engine(argument: str) -> bool:
    """Whether ``argument`` takes one of verl's config files that is not FSDP's, e.g. ref@actor_rollout_ref.ref=..."""
    key, _, value = argument.lstrip("+").partition("=")
    group, file = key.partition("@")[0].strip(), value.strip(" '\"")
    if group == "model_engine":
        return file != "dp"
    return group in ENGINES and not file.startswith(("dp_", "fsdp"))


def _check_types(before, after, arguments: Sequence[str]) -> None:
    """Raise SettingsError where one of ``arguments`` gives a value another type than it has in the config ``before``.

    verl checks few of its values, and those only once its workers are up: a learning rate of text fails after minutes,
    and the text "no" for a switch counts as true.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    for override in OverridesParser.create().parse_overrides(list(arguments)):
        key = override.key_or_group
        old, new = OmegaConf.select(before, key), OmegaConf.select(after, key)
        if wanted := _other_type(old, new):
            shown = f"{key}={one_line(str(new), 80)}"
            raise SettingsError(f"ARGS: {shown}: must be {wanted}, as {one_line(str(old), 40)} is")


def _other_type(old, new) -> str | None:
    """What ``new`` must be in place of ``old``, in words; None where it is that. Null may replace all but a group.

    verl's yaml has 0 and 1 for some fractions, and takes a text or a list of texts for the same key.
    """
    if isinstance(old, Mapping):
        return None if isinstance(new, Mapping) else "a group of keys"
    if new is None:
        return None
    if isinstance(old, bool):
        return None if isinstance(new, bool) or new in (0, 1) else "true or false"
    if isinstance(old, int | float):
        return None if isinstance(new, int | float) and not isinstance(new, bool) and isfinite(new) else "a number"
    if isinstance(old, str | Sequence):
        return None if isinstance(new, str | int | float | Sequence) and not isinstance(new, bool) else "text or a list"
    return None


def resolved(config_name: str, overrides: list[str], arguments: Sequence[str] = ()) -> dict:
    """``compose`` as plain values, every reference followed."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(compose(config_name, overrides, arguments=arguments), resolve=True)


def check(config) -> None:
    """Raise SettingsError for what of ``config`` ("ppo_trainer") verl would refuse late, or silently not do."""
    checks = (_not_fsdp, _no_counts, _without_effect, _indivisible, _apart, _too_few_cpus)
    for problem in chain.from_iterable(each(config) for each in checks):
        raise SettingsError(problem)


def _not_fsdp(config) -> Iterator[str]:
    policy = config.actor_rollout_ref
    for name, group in (("actor", policy.actor), ("ref", policy.ref), ("critic", config.critic)):
        if group.strategy not in ("fsdp", "fsdp2"):
            yield f"ARGS: {name}.strategy={group.strategy}: all stacks train with FSDP; leave it out"


def _too_few_cpus(config) -> Iterator[str]:
    """Ray's CPUs, where ARGS say how many: with fewer than a training holds (cluster.held_cpus) it waits for ever."""
    given = config.get("ray_kwargs", {}).get("ray_init", {}).get("num_cpus")
    if not given or "transfer_queue" not in config:
        return
    units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    teachers = config.distillation.n_gpus_per_node * config.distillation.nnodes if config.distillation.enabled else 0
    if given < (held := units + 1 + 3 * (gpus + teachers)):
        less = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
        fix = f"leave it out, or lower {less}={units}"
        yield f"ray_kwargs.ray_init.num_cpus={given}: a training holds {held} of Ray's CPUs, and would wait; {fix}"


def _no_counts(config) -> Iterator[str]:
    """Values that verl divides by, or by which it ends late."""
    from omegaconf import OmegaConf

    values = [(key, OmegaConf.select(config, key)) for key in (*COUNTS, *COUNTS_OR_NULL)]
    values += [(key, shared) for key, shared, _ in _sequence_parallel(config)]
    for key, value in values:
        if value is None and key in COUNTS_OR_NULL:
            continue
        if not isinstance(value, int) or value < 1:
            yield f"{key}={value}: must be a whole number above 0"


def _sequence_parallel(config) -> list[tuple[str, int, Mapping]]:
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
    for key, shared, model in _sequence_parallel(config):
        if shared == 1:
            continue
        if gpus % shared:
            yield f"{key}={shared}: must divide N_GPUS x NNODES = {gpus}"
        if not model.use_remove_padding:  # verl/workers/engine/fsdp/transformer_impl.py
            yield f"{key}={shared}: is for sequences without padding; leave use_remove_padding on"
        # Only around these kernels the whole sequence is gathered; another attends within each slice, silently.
        attention = (model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
        if attention not in ("varlen", "flash_attention_2"):
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
    if gpus % parallel:  # verl/workers/engine_workers.py, init_model
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


def _cpu_cache_gib() -> int:
    """vLLM's variable, which it reads as a whole number. Raises SettingsError."""
    text = os.environ.get("VLLM_CPU_KVCACHE_SPACE") or "4"
    if not re.fullmatch("[0-9]{1,6}", text):
        raise SettingsError(f"VLLM_CPU_KVCACHE_SPACE={text[:80]}: must be a whole number of GiB")
    return int(text)


def memory_plan(config) -> Plan:
    """What of ``config`` (of "ppo_trainer") decides on the memory of a training."""
    policy, trainer = config.actor_rollout_ref, config.trainer
    actor, rollout, model = policy.actor, policy.rollout, policy.model
    sequence = config.data.max_prompt_length + config.data.max_response_length
    dynamic, on_cpu = actor.use_dynamic_bsz, trainer.get("device") == "cpu"
    by_size = (actor.ppo_micro_batch_size_per_gpu or 1) * sequence
    return Plan(
        gpus=trainer.n_gpus_per_node * trainer.nnodes,
        gpus_here=trainer.n_gpus_per_node,
        tokens=actor.ppo_max_token_len_per_gpu if dynamic else by_size,
        tokens_by="MAX_TOKENS_PER_GPU" if dynamic else "MICRO_BATCH_SIZE",
        sequence=sequence,
        response=config.data.max_response_length,
        group=rollout.n,
        lora_rank=model.lora_rank,
        fused=bool(model.use_fused_kernels),
        padded=bool(dynamic and not model.use_remove_padding),
        checkpointing=bool(model.enable_gradient_checkpointing),
        weights_offloaded=bool(actor.fsdp_config.param_offload),
        optimizer_offloaded=bool(actor.fsdp_config.optimizer_offload),
        critic=bool(config.critic.enable or config.algorithm.adv_estimator == "gae"),
        reference=bool(config.algorithm.use_kl_in_reward or actor.use_kl_loss),
        reference_offloaded=not on_cpu,
        share=rollout.gpu_memory_utilization,
        tensor_parallel=rollout.tensor_model_parallel_size,
        sequence_parallel=actor.ulysses_sequence_parallel_size,
        batched_tokens=rollout.max_num_batched_tokens or 8192,
        sequences=rollout.max_num_seqs or 256,
        on_cpu=on_cpu,
        number=hardware.number_bytes(on_cpu),
        cache_bytes=_cpu_cache_gib() * GIB,
    )
