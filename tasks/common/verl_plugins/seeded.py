"""Seed the weights that verl draws (LoRA's A, a critic's head) with SEED; no version of verl seeds its workers."""

import functools
import os
from collections.abc import Callable

import torch


def seeded(build: Callable) -> Callable:
    """``build``, a method of verl that builds a model, after torch's random numbers are set to SEED."""

    @functools.wraps(build)
    def seeds_and_builds(*args, **kwargs):
        torch.manual_seed(int(os.environ.get("SEED") or 0))
        return build(*args, **kwargs)

    return seeds_and_builds
