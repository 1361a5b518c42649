"""The two generations of verl that the stacks pin. Our overrides are in the names of 0.9.1; how 0.6.1 differs is here.

Which stack has which verl: VERL of stacks/STACK. tests/test_verl_generations.py composes every stage's
overrides against the config files of both.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from verl_tasks.places import installed
from verl_tasks.settings import Settings, SettingsError, stack

VERLS_WORKERS = 8  # agent loops and rewards, each (verl/trainer/config)


@dataclass(frozen=True)
class Differences:
    """What makes of overrides in the names of verl 0.9.1 those of another version, for one of its configs.

    A key stands for itself, and one that ends in a dot for all below it; hydra's ``+`` before it does not count.
    """

    renamed: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # keys without counterpart
    # Keys, or key=value, of what it cannot do, and what to call that.
    refused: dict[str, str] = field(default_factory=dict)
    needed: Callable[[Settings], list[str]] = lambda s: []  # overrides that come before all others


def workers(s: Settings, most: int) -> int:
    """Agent-loop workers, up to ``most``. Those of 0.6.1 share a batch evenly or not at all (verl/protocol.py,
    DataProto.chunk)."""
    rollouts = s.TRAIN_BATCH_SIZE * s.ROLLOUT_N
    return most if has_own_trainers(s) else max(n for n in range(1, most + 1) if rollouts % n == 0)


def _rl_of_061(s: Settings) -> list[str]:
    needed = [
        # The agent loop, the only mode of 0.9.1. It takes the chat from the row.
        "actor_rollout_ref.rollout.mode=async",
        "data.return_raw_chat=True",
        f"actor_rollout_ref.rollout.agent.num_workers={workers(s, VERLS_WORKERS)}",  # where they can share a batch
        # Off by default there; algorithm.rollout_correction does nothing without them.
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        # With a custom sampler verl requires that the trainer's own process loads the data.
        "data.sampler.class_path=pkg://verl_tasks.verl_plugins.verl_061.order",
        "data.sampler.class_name=Shuffled",
        "data.dataloader_num_workers=0",
        # Between GPUs; with one, verl would spend a second a step on it (1,024 rollouts). 0.9.1 reads the key nowhere.
        f"trainer.balance_batch={s.world_size > 1}",
    ]
    if not s.LORA_RANK:
        return needed
    # vLLM gets the adapter alone, so it must read the base model itself and keep it while it sleeps. At verl's default,
    # sleep level 2, verl sends the base model again, under names that vLLM's LoRA layers do not have.
    return [
        *needed,
        "actor_rollout_ref.rollout.load_format=safetensors",
        "actor_rollout_ref.rollout.layered_summon=True",
    ]


def _sft_of_061(s: Settings) -> list[str]:
    return [
        f"trainer.save_freq={s.SAVE_FREQ}",  # it has no sft_steps.py
        # With 1 it removes the checkpoint before it writes the next (fsdp_checkpoint_manager.py).
        "trainer.max_ckpt_to_keep=2",
        # A fixed number of sequences it takes by TensorDict.split, which torch 2.8 refuses for nested tensors.
        "data.use_dynamic_bsz=True",
        # As many tokens as MICRO_BATCH_SIZE of the longest sequences have. Its SFT has no fused kernels: all logits of
        # a pass are there at once, and MAX_TOKENS_PER_GPU would be too many.
        f"data.max_token_len_per_gpu={s.MICRO_BATCH_SIZE * (s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH)}",
    ]


# By version, then by the name of the config.
DIFFERENCES = {
    "0.9.1": {"ppo_trainer": Differences(), "sft_trainer_engine": Differences()},
    "0.6.1": {
        "ppo_trainer": Differences(
            renamed={
                "reward.custom_reward_function.": "custom_reward_function.",
                "reward.reward_manager.name": "reward_model.reward_manager",
                "reward.reward_kwargs.": "reward_model.reward_kwargs.",
                "critic.fsdp.": "critic.model.fsdp_config.",
            },
            left_out=(
                "trainer.v1.trainer_mode",  # it has one trainer
                "reward.num_workers",  # it has one for each agent-loop worker
                "critic.fsdp.ulysses_sequence_parallel_size",  # of the critic itself
                "actor_rollout_ref.actor.shuffle",  # read by its Megatron workers only; verl_plugins/verl_061/order.py
                # Rollouts are seeded by the rank (verl/workers/fsdp_workers.py, gen_random_states).
                "actor_rollout_ref.rollout.seed",
                # It divides by the padded length, MAX_RESPONSE_LENGTH.
                "actor_rollout_ref.actor.loss_scale_factor",
                "actor_rollout_ref.actor.checkpoint.save_lora_only",  # its LoRA checkpoints have the base model too
            ),
            refused={
                "trainer.v1.egpo.": "METHOD=egpo",  # no trainer that can be replaced
                # The chat is no longer in the batch when the scorer looks for it (verl/trainer/ppo/ray_trainer.py,
                # _get_gen_batch), and a classifier whose head is not called as a token classifier's gets a random one.
                "reward.reward_model.": "REWARD_MODEL",
                "algorithm.rollout_correction.rollout_rs": "ROLLOUT_CORRECTION=sequence",  # it has no seq_mean_k3
                # Known to its config, used by no trainer.
                "algorithm.filter_groups.": "METHOD=dapo (algorithm.filter_groups)",
                "actor_rollout_ref.actor.policy_loss.loss_mode=cispo": "METHOD=cispo",  # not among its losses
                "distillation.": "METHOD=distill",
            },
            needed=_rl_of_061,
        ),
        "sft_trainer_engine": Differences(
            # torchrun sets the number of GPUs; _sft_of_061 has the others.
            left_out=(
                "trainer.n_gpus_per_node",
                "trainer.max_ckpt_to_keep",
                "data.use_dynamic_bsz",
                "data.max_token_len_per_gpu",
                "checkpoint.save_lora_only",
            ),
            needed=_sft_of_061,
        ),
    },
}


def wanted(s: Settings) -> str:
    """The version of verl that the stack is for."""
    return stack(s.STACK).VERL


def check_installed(s: Settings) -> None:
    """Raise SettingsError unless this Python has the stack's version of verl. Does not import it."""
    if (found := installed("verl") or "none") != wanted(s):
        fix = f"run `make install STACK={s.STACK}`, or set PYTHON to a Python with that version"
        raise SettingsError(f"STACK={s.STACK}: needs verl {wanted(s)}, {sys.executable} has {found}; {fix}")


def has_own_trainers(s: Settings) -> bool:
    """Whether the trainers of the methods (tasks/common/training/methods, TRAINER) run on the stack's verl."""
    return wanted(s) == "0.9.1"


def translated(overrides: list[str], config_name: str, s: Settings) -> list[str]:
    """``overrides``, in the names of verl 0.9.1, as the stack's verl knows them.

    Raises SettingsError for what that version cannot do.
    """
    return [*DIFFERENCES[wanted(s)][config_name].needed(s), *renamed(overrides, config_name, s)]


def renamed(overrides: list[str], config_name: str, s: Settings) -> list[str]:
    """``translated`` without the version's own overrides (``needed``)."""
    version = wanted(s)
    differences, result = DIFFERENCES[version][config_name], []
    for override in overrides:
        plus, key, value = re.fullmatch(r"([+~]*)([^=]*)(.*)", override, re.DOTALL).groups()
        if what := _find(key, differences.refused) or _find(f"{key}{value}", differences.refused):
            name = differences.refused[what]
            raise SettingsError(f"{name}: STACK={s.STACK} has verl {version}, which cannot do it; take STACK=current")
        if _find(key, differences.left_out):
            continue
        if name := _find(key, differences.renamed):
            key = differences.renamed[name] + key.removeprefix(name)
        result.append(f"{plus}{key}{value}")
    return result


def _find(key: str, names) -> str | None:
    """Which of ``names`` is ``key``, or a group that it is in."""
    return next((name for name in names if key == name or (name.endswith(".") and key.startswith(name))), None)
