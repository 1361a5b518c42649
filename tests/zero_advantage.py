"""What test_verl_patches.py runs with torchrun: an update of verl's FSDP engine with all responses, and with those
that have no advantage forward only. Float32 on a CPU; of each process: which rows had a gradient, and what came out."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import verl  # noqa: F401  (loads VERL_USE_EXTERNAL_MODULES)
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.fsdp import transformer_impl

from tests.sequence_parallel import PATHS, VOCABULARY, write_found
from verl_tasks.verl_plugins import on_policy, one_update, parity, zero_advantage
from verl_tasks.verl_plugins.cpu.verl_platform import CPUEngineWithLMHead

PROMPTS, RESPONSES = (3, 3, 5, 5, 4, 4, 2, 2), (7, 2, 20, 9, 1, 13, 6, 8)
# Of each process. A masked response counts for nothing, whatever its advantage.
ADVANTAGES = ((0, 0, 0.5, -1, 0, 0, 1, 2), (0, 0, 1, 2, 3, -1, 0.5, 1))
MASKED = 6
DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 30}
FIXED = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}


def batch(rank: int, advantages: tuple[float, ...], path: dict, **options) -> TensorDict:
    """The mini-batch of a process, as its worker has it."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.full((n,), 3 + n) for n in PROMPTS]
    responses = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in RESPONSES]
    rows = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    data = parity.batch(rows, path)
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    masks = [torch.full((len(r),), float(n != MASKED)) for n, r in enumerate(responses)]
    more = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": masks,
        "loss_mask": [torch.cat([torch.zeros(len(p)), m]) for p, m in zip(prompts, masks, strict=True)],
        "advantages": [torch.full((len(r),), float(a)) for r, a in zip(responses, advantages, strict=True)],
        "rollout_log_probs": [-torch.rand(len(r), generator=generator) for r in responses],
        "old_log_probs": [-4 * torch.rand(len(r), generator=generator) - 1 for r in responses],  # but for ON_POLICY
    }
    for name, values in more.items():
        data[name] = nested(values)
    options |= {"global_batch_size": len(rows) * dist.get_world_size(), one_update.CAP: 2.0}
    tensordict_utils.assign_non_tensor(data, **options)
    return data


def updated(made, data: TensorDict) -> dict:
    """The rows with a gradient, the gradient, and the metrics of an update of the engine ``made``."""
    trained = []
    step = zero_advantage._forward_step

    def seen(self, micro_batch, *given):
        if torch.is_grad_enabled():
            trained.extend(row.tolist() for row in micro_batch["responses"].unbind())
        return step(self, micro_batch, *given)

    config = FSDPActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=2)
    zero_advantage._forward_step = seen
    try:
        with made.train_mode():
            output = made.forward_backward_batch(data, partial(on_policy.ppo_loss, config))
            gradients = [parity.whole(p.grad).flatten() for p in made.module.parameters()]
    finally:
        zero_advantage._forward_step = step
    named = {tuple(row.tolist()): number for number, row in enumerate(data["responses"].unbind())}
    metrics = {name: value for name, value in output["metrics"].items() if isinstance(value, Metric)}
    sums = {name: value for name, value in metrics.items() if value.aggregation == AggregationType.SUM}
    return {
        "trained": sorted(named[tuple(row)] for row in trained),
        "gradients": torch.cat(gradients),
        # verl takes means of the others over micro-batches.
        "metrics": {name: float(value.aggregate()) for name, value in sums.items()},
    }


def compared(folder: Path) -> Iterator[tuple[str, dict]]:
    """Of each case both updates."""
    rank = dist.get_rank()
    ways = {
        "fixed": (CPUEngineWithLMHead, PATHS[True], FIXED),
        "dynamic": (transformer_impl.FSDPEngineWithLMHead, PATHS[False], DYNAMIC),
    }
    for way, (kind, path, options) in ways.items():
        made = parity.engine(kind, folder, path)
        own = ADVANTAGES[rank]
        cases = {"": (own, True), ", ratios": (own, False), ", none": ((0,) * len(PROMPTS), True)}
        for case, (advantages, single) in cases.items():
            given = options | {one_update.ON_POLICY: single}
            every, some = (
                updated(made, batch(rank, advantages, path, **given, **{zero_advantage.ALLOWED: allowed}))
                for allowed in (False, True)
            )
            size = float(every["gradients"].norm())
            yield (
                way + case,
                {
                    "trained": [every["trained"], some["trained"]],
                    "size": size,
                    "off": float((every["gradients"] - some["gradients"]).norm()),
                    "metrics": [every["metrics"], some["metrics"]],
                },
            )


if __name__ == "__main__":
    write_found(compared)
