"""The order of the rows with verl 0.6.1: prompts shuffled anew after a resume, mini-batches of mixed lengths.

verl uses torch's RandomSampler (trainer/main_ppo.py, create_rl_sampler), whose state is not saved: a run resumed in its
second epoch would repeat the order of the first. ``Shuffled`` uses torchdata's, as 0.9.1 does.

verl divides a batch evenly over the GPUs and sorts each part by length, the shortest at both ends (_balance_batch of
trainer/ppo/ray_trainer.py): of four mini-batches the two in the middle get all long responses. On one GPU a batch keeps
the random order of the prompts. verl 0.9.1 shuffles (actor.shuffle). Test: tests/test_a100_stack.py.
"""

from collections.abc import Iterator

import torch
from torchdata.stateful_dataloader.sampler import RandomSampler
from verl import DataProto
from verl.experimental.dataset.sampler import AbstractSampler
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from verl_tasks.verl_plugins.expect import expect

expect(RayPPOTrainer._balance_batch, "partition.sort(key=lambda x: (global_seqlen_lst[x], x))", "batch.reorder(")
expect(RayPPOTrainer.fit, "self._balance_batch(batch, metrics=metrics)")

_balance_batch = RayPPOTrainer._balance_batch


class Shuffled(AbstractSampler):
    """Named by ``data.sampler``; the order follows from ``data.seed``."""

    def __init__(self, data_source, data_config):
        generator = torch.Generator()
        generator.manual_seed(data_config.seed)
        self.sampler = RandomSampler(data_source, generator=generator)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def balance_batch(self, batch: DataProto, *args, **kwargs) -> None:
    """verl's, with the rows of each GPU shuffled by SEED and the step."""
    _balance_batch(self, batch, *args, **kwargs)
    generator = torch.Generator().manual_seed(self.config.data.seed + self.global_steps)
    rows = torch.arange(len(batch)).chunk(self.actor_rollout_wg.world_size)
    batch.reorder(torch.cat([part[torch.randperm(len(part), generator=generator)] for part in rows]))


RayPPOTrainer._balance_batch = balance_batch
