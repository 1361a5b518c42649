"""From our variables to verl's hydra keys: the mapping stands only here.

One list for each group of verl's config; the overrides of the stack come next, then the method's, last the user's. Ours
are in the names of verl 0.9.1, which verl_versions.py translates; the user's in those of the installed verl.
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import isfinite
from pathlib import Path

from verl_tasks.machine import cluster, hardware
from verl_tasks.machine.memory import GIB, Plan
from verl_tasks.models import reward_model
from verl_tasks.models.find import resolve_whole, whole_model
from verl_tasks.models.merge import base_model, is_adapter
from verl_tasks.places import PACKAGE
from verl_tasks.settings import Settings, SettingsError, method, stack
from verl_tasks.text import one_line
from verl_tasks.training import parity, tracking, verl_checks, verl_versions
from verl_tasks.training.parity import Pass

PLUGINS = PACKAGE / "verl_plugins"

TRAINED = ("actor_rollout_ref.actor.fsdp_config", "critic.fsdp")  # models with an optimizer
POLICY = "actor_rollout_ref.model"
ENGINES = ("actor", "ref", "critic", "engine", "optim")  # groups of verl's config with a file for each engine

# No outputs/ folder of hydra's own; what it would log is in our log file.
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


def _saved(s: Settings, key: str) -> list[str]:
    """What a checkpoint has. With hf_model it has a folder that vLLM and transformers load; not for LoRA, where nothing
    loads it because its names are peft's (tasks/common/models/merge.py makes the adapter). The frozen base model, 30 GB
    of 7B, is not saved again."""
    if not s.LORA_RANK:
        return [f"{key}.save_contents=[model,optimizer,extra,hf_model]"]
    return [f"{key}.save_contents=[model,optimizer,extra]", f"+{key}.save_lora_only=True"]


def _trainer(s: Settings, run_dir: Path, steps: int, save_freq: int) -> list[str]:
    """What the trainers of RL and SFT have in common."""
    return [
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1000000",  # the steps end the training
        f"trainer.n_gpus_per_node={s.N_GPUS}",
        f"trainer.project_name={quoted(tracking.project(s))}",
        f"trainer.experiment_name={quoted(run_dir.name)}",
        f"trainer.logger=[{','.join(['console', 'file', *tracking.loggers(s)])}]",
        f"trainer.default_local_dir={quoted(run_dir / 'checkpoints')}",
        f"trainer.save_freq={save_freq}",
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


def trainer_of(s: Settings) -> tuple[str, str]:
    """The module of the trainer of METHOD and ASYNC, and the name by which verl knows that trainer."""
    if s.ASYNC == "off":
        return method(s.METHOD).TRAINER, method(s.METHOD).MODE
    if s.sampling_gpus:
        return "verl_tasks.verl_plugins.separate_trainer", "task_separate"
    return "verl_tasks.verl_plugins.async_trainer", "task_async"


def _async(s: Settings) -> list[str]:
    """verl_plugins/async_trainer.py, separate_trainer.py; a step waits for prompts that would become too old rather
    than drop them."""
    if s.ASYNC == "off":
        return []
    sampler = "trainer.v1.sampler.max_off_policy"
    return [
        f"{sampler}_threshold={s.STALENESS + 1}",  # verl counts the versions, the newest too
        f"{sampler}_strategy=wait",
        # Else as many prompts and responses as verl says end a training (100,000): STALENESS=11 has them, 512 x 16.
        "transfer_queue.backend.SimpleStorage.total_storage_size=null",
        *(_separate(s) if s.sampling_gpus else []),
    ]


def _separate(s: Settings) -> list[str]:
    """GPUs that only sample. verl then draws each mini-batch by itself, and its rate rises with them."""
    own, rollout = "trainer.v1.separate_async", "actor_rollout_ref.rollout"
    mini_batches = s.TRAIN_BATCH_SIZE // s.MINI_BATCH_SIZE
    return [
        f"{own}.parameter_sync_step={mini_batches}",
        f"actor_rollout_ref.actor.optim.lr_warmup_steps={s.LR_WARMUP * mini_batches}",
        # One batch less than would make a step wait for the slowest response of the oldest; none that no step trains.
        f"{own}.num_warmup_batches={max(1, min(s.STALENESS, s.STEPS) - 1)}",
        "actor_rollout_ref.hybrid_engine=False",
        f"trainer.n_gpus_per_node={s.training_gpus}",
        f"{rollout}.nnodes={s.NNODES}",
        f"{rollout}.n_gpus_per_node={s.sampling_gpus}",
        f"{rollout}.checkpoint_engine.backend=broadcast",
        f"{rollout}.checkpoint_engine.custom_backend_module=verl_tasks.verl_plugins.broadcast",
    ]


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
        *_saved(s, "actor_rollout_ref.actor.checkpoint"),
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
    rollout += CORRECTIONS[s.ROLLOUT_CORRECTION]
    rollout += [f"actor_rollout_ref.rollout.quantization={s.ROLLOUT_DTYPE}"] if s.ROLLOUT_DTYPE != "same" else []
    if sharing := os.environ.get("SHARED_GPU"):  # by launch/experiments.py; each worker imports verl: 0.7 GB
        workers = verl_versions.workers(s, max(1, verl_versions.VERLS_WORKERS // int(sharing)))
        rollout += [f"actor_rollout_ref.rollout.agent.num_workers={workers}", f"reward.num_workers={workers}"]
    trainer = [
        *_trainer(s, run_dir, s.STEPS, s.SAVE_FREQ),
        f"trainer.nnodes={s.NNODES}",
        f"trainer.rollout_data_dir={quoted(run_dir / 'rollouts')}",
        f"trainer.validation_data_dir={quoted(run_dir / 'validation')}",
        f"trainer.v1.trainer_mode={trainer_of(s)[1]}",
        "trainer.val_before_train=False",
        f"trainer.test_freq={s.TEST_FREQ or -1}",
    ]
    chosen = parity.decided(s)
    own = [*stack(s.STACK).RL_OVERRIDES, *_pass(chosen, POLICY), *_pass(chosen, "critic.model", head=False)]
    own += getattr(stack(s.STACK), "rl_overrides", lambda s: [])(s)
    method_ = [*_truncated(s), *method(s.METHOD).overrides(s)]
    overrides = [*data, *model_, *actor, *_micro_batches(s), *rollout, *_reward(s), *trainer, *_ray(s)]
    overrides += [*own, *method_, *_async(s)]
    return verl_versions.translated(overrides, "ppo_trainer", s)


def _pass(chosen: Pass | None, model: str, head: bool = True) -> list[str]:
    """How sequences pass through the ``model`` at that key; ``head``: it gives log-probs, as a critic does not. Nothing
    for a stack that has one way alone."""
    if not chosen:
        return []
    # liger-kernel patches a whole process, so the critic has it where the policy has.
    liger = chosen.liger if head else f"${{{POLICY}.use_liger}}"
    own = {"attn_implementation": chosen.attention} | dict.fromkeys(chosen.noise, 0.0)
    fused = [f"{model}.use_fused_kernels={chosen.fused}"] if head else []
    overridden = [f"+{model}.override_config.{name}={value}" for name, value in own.items()]
    return [*overridden, f"{model}.use_remove_padding={chosen.packed}", f"{model}.use_liger={liger}", *fused]


def critic_overrides(s: Settings, model: str) -> list[str]:
    """Where ``model`` is an adapter: a critic begins as the policy, not as its base. Merges the adapter."""
    continues = s.METHOD == "ppo" and is_adapter(Path(model))
    return [f"critic.model.path={quoted(whole_model(model))}"] if continues else []


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
        *_trainer(s, run_dir, s.SFT_STEPS, -1),  # verl_plugins/sft_steps.py saves by the clock
        f"trainer.seed={s.SEED}",
        "trainer.max_ckpt_to_keep=1",
        *_saved(s, "checkpoint"),
        "checkpoint.load_contents=[model,optimizer,extra]",
    ]
    own = [f"engine.ulysses_sequence_parallel_size={s.SP}", *stack(s.STACK).SFT_OVERRIDES]
    own += _pass(parity.decided(s), "model")
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
                verls = partial(hydra_compose, config_name)
                _check_types(verls, hydra_compose(config_name, overrides), config, arguments)
                OmegaConf.to_container(config, resolve=True)  # raises for a reference to nothing
            return config
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(f"verl's config refuses an override (ARGS?): {' '.join(str(error).split())}") from error


def rl_config(s: Settings, arguments: Sequence[str] = ()):
    """verl's config of an RL training from MODEL, checked. Raises SettingsError."""
    overrides = rl_overrides(s, s.MODEL, s.runs_dir)
    config = compose("ppo_trainer", overrides, arguments=arguments)
    verl_checks.check_composed(config)
    for problem in _another_model(s, config.actor_rollout_ref.model):
        raise SettingsError(problem)
    if problem := getattr(stack(s.STACK), "SP_PROBLEM", ""):
        for key, shared, _ in verl_checks.sequence_parallel(config):
            if shared > 1:
                raise SettingsError(f"{key}={shared}: {problem}")
    return config


def _another_model(s: Settings, model) -> Iterator[str]:
    """What ARGS change so that the checks, the checkpoints and the evaluation are of another model than what trains."""
    for key, value, wanted, name in (
        ("path", model.path, base_model(s.MODEL), "MODEL"),
        ("lora_rank", model.lora_rank, s.LORA_RANK, "LORA_RANK"),
        ("lora_alpha", model.lora_alpha, s.LORA_ALPHA, "LORA_ALPHA"),
    ):
        if value != wanted:
            yield f"ARGS: model.{key}={value}: is {name}={getattr(s, name)}; set {name}"


def save_contents(s: Settings, arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """What a checkpoint has of the policy and of a critic, by verl's config, where ``arguments`` may change it."""
    if arguments and not s.by_pairs:
        with suppress(SettingsError):  # the estimate of memory says it
            config = rl_config(s, arguments)
            return config.actor_rollout_ref.actor.checkpoint.save_contents, config.critic.checkpoint.save_contents
    state = ("model", "optimizer")
    return (state if s.LORA_RANK else (*state, "hf_model")), state


def _of_another_engine(argument: str) -> bool:
    """Whether ``argument`` takes one of verl's config files that is not FSDP's, e.g. ref@actor_rollout_ref.ref=..."""
    key, _, value = argument.lstrip("+").partition("=")
    group, file = key.partition("@")[0].strip(), value.strip(" '\"")
    if group == "model_engine":
        return file != "dp"
    return group in ENGINES and not file.startswith(("dp_", "fsdp"))


def _check_types(verls, before, after, arguments: Sequence[str]) -> None:
    """Raise SettingsError where one of ``arguments`` gives a value another type than it has in the config ``before``.
    Null may replace what is null in verl's own, which ``verls`` composes.

    verl checks few of its values, and those only once its workers are up: a learning rate of text fails after minutes,
    and the text "no" for a switch counts as true.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    for override in OverridesParser.create().parse_overrides(list(arguments)):
        key = override.key_or_group
        old, new = OmegaConf.select(before, key), OmegaConf.select(after, key)
        may_be_null = new is None and OmegaConf.select(verls(), key) is None
        if not may_be_null and (wanted := _other_type(old, new)):
            shown = f"{key}={one_line(str(new), 80)}"
            raise SettingsError(f"ARGS: {shown}: must be {wanted}, as {one_line(str(old), 40)} is")


def _other_type(old, new) -> str | None:
    """What ``new`` must be in place of ``old``, in words; None where it is that.

    verl's yaml has 0 and 1 for some fractions, and takes a text or a list of texts for the same key.
    """
    if isinstance(old, Mapping):
        return None if isinstance(new, Mapping) else "a group of keys"
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
        samplers=verl_checks.samplers(config),
        share=rollout.gpu_memory_utilization,
        tensor_parallel=rollout.tensor_model_parallel_size,
        sequence_parallel=actor.ulysses_sequence_parallel_size,
        batched_tokens=rollout.max_num_batched_tokens or 8192,
        sequences=rollout.max_num_seqs or 256,
        on_cpu=on_cpu,
        number=hardware.number_bytes(on_cpu),
        cache_bytes=_cpu_cache_gib() * GIB,
    )
