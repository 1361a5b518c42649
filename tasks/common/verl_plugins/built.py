"""What both verls' patches.py put around the making of a model: its drawn weights, and its config.json."""

import functools
import os
from collections.abc import Callable

import torch


def seeded(build: Callable) -> Callable:
    """``build``, a method of verl that builds a model, after torch's random numbers are set to SEED: LoRA's A and a
    critic's head are drawn, and no version of verl seeds its workers."""

    @functools.wraps(build)
    def seeds_and_builds(*args, **kwargs):
        torch.manual_seed(int(os.environ.get("SEED") or 0))
        return build(*args, **kwargs)

    return seeds_and_builds


def without_attention(update: Callable) -> Callable:
    """``update``, verl's update_model_config, without ``attn_implementation``.

    verl makes the config with it before. Written into config.json too, it would bind every program that loads the
    model to an attention which only our processes know, or to flash-attn.
    """

    def updated(module_config, override_config_kwargs: dict) -> None:
        kept = {name: value for name, value in override_config_kwargs.items() if name != "attn_implementation"}
        update(module_config, kept)

    return updated
