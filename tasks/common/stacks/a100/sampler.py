"""A shuffled order of the prompts with verl 0.6.1 that survives a resume in any epoch.

verl 0.6.1 uses torch's RandomSampler (trainer/main_ppo.py, create_rl_sampler), whose state is not saved: a run resumed
in its second epoch would repeat the order of the first. This uses torchdata's, as 0.9.1 does.
"""

from collections.abc import Iterator

import torch
from torchdata.stateful_dataloader.sampler import RandomSampler
from verl.experimental.dataset.sampler import AbstractSampler


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
