"""How a step's responses come into mini-batches, and which steps train what, by verl's trainer and workers.

Between them only the queue and the model are left out. With verl 0.6.1: test_a100_stack.py.
"""

from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tensordict import TensorDict

from tests.test_verl_config import settings_of
from verl_tasks.training import verl_config

LENGTHS = torch.randint(10, 500, (128,), generator=torch.Generator().manual_seed(0)).sort().values.tolist()
GROUP = 8  # responses a prompt; 16 prompts, in 4 mini-batches


@pytest.fixture(scope="module")
def module():
    from verl_tasks.verl_plugins import trainer  # here: importing verl takes seconds

    return trainer


@pytest.fixture
def trainer(module, monkeypatch):
    """A trainer in step 1 with a critic, that asks the workers for nothing but updates."""
    small = {"METHOD": "ppo", "TRAIN_BATCH_SIZE": "16", "MINI_BATCH_SIZE": "4", "ROLLOUT_N": str(GROUP), "SEED": "7"}
    s = settings_of("countdown", monkeypatch, **small, CRITIC_WARMUP="2")
    made = object.__new__(module.TaskTrainer)
    made.config = verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, "m", Path("/r")))
    made.global_steps, made.use_critic, made.use_reference_policy = 1, True, False
    made.distillation_config = None
    made.tokenizer = SimpleNamespace(eos_token_id=0)
    monkeypatch.setattr(module, "_tensors", lambda batch: batch)  # no fields in a queue
    return made


def taken(extra_info: dict, order: list[int], gpus: int, rank: int, made: list[list[float]]) -> dict:
    """What the worker of GPU ``rank`` does with its part of a batch in that ``order``; its mini-batches' lengths."""
    from verl.utils import tensordict_utils
    from verl.workers.engine_workers import TrainingWorker

    rows = [LENGTHS[row] for row in order]
    part = rows[rank * len(rows) // gpus : (rank + 1) * len(rows) // gpus]
    data = TensorDict({"lengths": torch.tensor(part)}, batch_size=len(part))
    tensordict_utils.assign_non_tensor(data, **extra_info)
    worker = object.__new__(TrainingWorker)
    worker.profiler = mock.Mock()
    worker.engine = SimpleNamespace(
        get_data_parallel_size=lambda: gpus,
        get_data_parallel_rank=lambda: rank,
        train_mode=lambda **_: nullcontext(),
        is_mp_src_rank_with_outputs=lambda: False,
    )
    worker.train_batch = lambda mini: made.append(mini["lengths"].tolist())
    worker.train_mini_batch(data)
    return made


def mean_lengths(trainer, part: str, gpus: int) -> list[float]:
    """Of the mini-batches of the actor or the critic; the batch comes as TransferQueue keeps it, short ones first."""
    from transfer_queue import KVBatchMeta
    from verl.utils import tensordict_utils

    tags = [{"seq_len": length} for length in LENGTHS]
    batch = KVBatchMeta(partition_id="train", keys=[str(row) for row in range(len(LENGTHS))], tags=tags)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(gpus))})
    batch = trainer._balance_batch(batch, {})
    each = [[] for _ in range(gpus)]

    def update(meta):
        for rank in range(gpus):
            taken(meta.extra_info, [int(key) for key in meta.keys], gpus, rank, each[rank])
        metrics = TensorDict({}, batch_size=[])
        tensordict_utils.assign_non_tensor(metrics, metrics={"mfu": [0.0]})
        return SimpleNamespace(get=lambda: metrics) if part == "critic" else metrics

    if part == "critic":
        trainer.critic_wg = SimpleNamespace(train_mini_batch=update)
        trainer._update_critic(batch, {})
    else:
        trainer.actor_rollout_wg.update_actor = update
        trainer._update_actor(batch, {})
    assert sorted(length for mine in each for mini in mine for length in mini) == LENGTHS
    return [float(torch.tensor([*chain(*minis)]).float().mean()) for minis in zip(*each, strict=True)]


def spread(lengths: list[float]) -> float:
    assert len(lengths) == 4
    return max(lengths) - min(lengths)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("part", ["actor", "critic"])
def test_mini_batches_are_of_mixed_lengths(trainer, part, gpus):
    lengths = mean_lengths(trainer, part, gpus)
    assert spread(lengths) < 100
    assert mean_lengths(trainer, part, gpus) == lengths
    trainer.global_steps = 2
    assert mean_lengths(trainer, part, gpus) != lengths
    trainer.global_steps, trainer.config.data.seed = 1, 8
    assert mean_lengths(trainer, part, gpus) != lengths


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_without_shuffling_the_longest_are_trained_last(trainer, part):
    """What the shuffling is for."""
    trainer.config.actor_rollout_ref.actor.shuffle = trainer.config.critic.shuffle = False
    lengths = mean_lengths(trainer, part, 1)
    assert spread(lengths) > 300 and lengths == sorted(lengths)


def test_the_policy_is_trained_after_the_critics_warm_up(trainer, module):
    trained = {"_update_critic": [], "_update_actor": []}
    steps = ["_balance_batch", "_compute_old_log_prob", "_compute_values", "_compute_advantage"]
    for name in steps:
        setattr(trainer, name, lambda batch, metrics: batch)
    for name, seen in trained.items():
        setattr(trainer, name, lambda batch, metrics, seen=seen: seen.append(trainer.global_steps) or batch)
    batch = SimpleNamespace(extra_info={})
    trainer.replay_buffer = SimpleNamespace(sample=lambda **_: (batch, {}))
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.on_sample_begin = trainer.on_sample_end = lambda: None
    for trainer.global_steps in range(1, 6):
        trainer._step_once({}, {}, 16)
    assert trained == {"_update_critic": [1, 2, 3, 4, 5], "_update_actor": [3, 4, 5]}
