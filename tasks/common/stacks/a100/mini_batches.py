"""Mini-batches of mixed lengths with verl 0.6.1 on several GPUs (0.9.1: actor.shuffle, verl_plugins/trainer.py).

verl divides a batch evenly over the GPUs and sorts each part by length, the shortest at both ends (_balance_batch of
trainer/ppo/ray_trainer.py): of four mini-batches the two in the middle get all long responses. On one GPU a batch keeps
the random order of the prompts. verl_patches.py loads this in every verl process.
"""

import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from tasks.common.verl_plugins.expect import expect

expect(RayPPOTrainer._balance_batch, "partition.sort(key=lambda x: (global_seqlen_lst[x], x))", "batch.reorder(")
expect(RayPPOTrainer.fit, "self._balance_batch(batch, metrics=metrics)")

_balance_batch = RayPPOTrainer._balance_batch


def balance_batch(self, batch: DataProto, *args, **kwargs) -> None:
    """verl's, with the rows of each GPU shuffled by SEED and the step."""
    _balance_batch(self, batch, *args, **kwargs)
    generator = torch.Generator().manual_seed(self.config.data.seed + self.global_steps)
    rows = torch.arange(len(batch)).chunk(self.actor_rollout_wg.world_size)
    batch.reorder(torch.cat([part[torch.randperm(len(part), generator=generator)] for part in rows]))


RayPPOTrainer._balance_batch = balance_batch
