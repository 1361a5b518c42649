"""What test_prompts_once.py runs with torchrun: verl's FSDP engine, each prompt of a batch once and as often as it was
sampled. Float32 on a CPU, with the reference of the GPU's kernel; of each process: what came out, and how far apart."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import verl  # noqa: F401  (loads VERL_USE_EXTERNAL_MODULES)
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.sequence_parallel import VOCABULARY, write_found
from verl_tasks.machine.memory import PROMPTS_ONCE
from verl_tasks.verl_plugins import on_policy, one_update, parity, prompts_once, zero_advantage

# Of each process, in no order: groups of several sizes, a prompt of one token, two prompts that differ in the last.
PROMPTS = ("long", "one", "long", "alone", "one", "twin", "long", "other twin", "twin", "other twin", "one", "long")
RESPONSES = (7, 2, 20, 9, 1, 13, 6, 8, 5, 1, 17, 3)
ADVANTAGES = (0.5, 0, -1, 2, 0, 0, 1, 0, 0, -0.5, 1, 2)
TOKENS = 40  # of a pass: the longest sequence has 31


def batch(path: dict, rank: int, temperatures: torch.Tensor | None = None, **options) -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    drawn = partial(torch.randint, 0, VOCABULARY, generator=generator)
    long, twin = drawn((11,)), drawn((4,))
    kinds = {"long": long, "one": drawn((1,)), "alone": drawn((6,)), "twin": twin}
    kinds["other twin"] = torch.cat([twin[:3], (twin[3:] + 1) % VOCABULARY])
    # The processes have other responses; the second has no long one, so it needs fewer micro-batches.
    lengths = [max(1, n // 3) for n in RESPONSES] if rank else RESPONSES
    prompts, responses = [kinds[name] for name in PROMPTS], [drawn((n,)) for n in lengths]
    data = parity.batch([torch.cat(pair) for pair in zip(prompts, responses, strict=True)], path, TOKENS)
    more = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": [(torch.arange(len(r)) != 1).float() for r in responses],
        "advantages": [torch.full((len(r),), float(a)) for r, a in zip(responses, ADVANTAGES, strict=True)],
        "rollout_log_probs": [-torch.rand(len(r), generator=generator) for r in responses],
        "old_log_probs": [-4 * torch.rand(len(r), generator=generator) - 1 for r in responses],
    }
    more["loss_mask"] = [
        torch.cat([torch.zeros(len(p)), m]) for p, m in zip(prompts, more["response_mask"], strict=True)
    ]
    for name, values in more.items():
        data[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    options |= {"global_batch_size": len(prompts) * dist.get_world_size(), one_update.CAP: 2.0}
    if temperatures is not None:
        data["temperature"] = temperatures
    tensordict_utils.assign_non_tensor(data, **options)
    return data


def computed(made, path: dict, **options) -> dict:
    """Outputs of the tokens that responses are predicted from, the update's gradient, and the rows that were passed."""
    rank, passed = dist.get_rank(), []
    data = batch(path, rank, **options | {zero_advantage.ALLOWED: False})  # which an update has alone
    whole = made.module.get_decoder().register_forward_pre_hook(
        lambda module, given, named: passed.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    with made.eval_mode():
        output = made.infer_batch(data)["model_output"]
    inferred, predicted = len(passed), []
    for name in ("log_probs", "entropy"):
        rows = zip(output[name].unbind(), data["responses"].unbind(), strict=True)
        predicted += [row[-len(response) - 1 : -1] for row, response in rows]
    own = {"entropy_coeff": 0 if options.get(zero_advantage.ALLOWED) else 0.01}
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=2, **own)
    with made.train_mode():
        metrics = made.forward_backward_batch(batch(path, rank, **options), partial(on_policy.ppo_loss, config))
        gradients = torch.cat([parity.whole(p.grad).flatten() for p in made.module.parameters() if p.requires_grad])
    whole.remove()
    return {
        "values": torch.cat(predicted),
        "gradients": gradients,
        "passed": passed[inferred:],
        "loss": sum(metrics["loss"]),
        "lengths": [len(row) for row in output["log_probs"].unbind()]
        == batch(path, rank)["input_ids"].offsets().diff().tolist(),
    }


CASES = {
    "logits": (False, 0, {"temperatures": torch.linspace(0.5, 2, len(PROMPTS))}),
    "fused": (True, 0, {}),
    "fused, no gradient of some": (True, 0, {zero_advantage.ALLOWED: True}),
    "fused, ratios": (True, 0, {one_update.ON_POLICY: False}),
    "fused, fixed": (True, 0, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4}),
    "fused, LoRA": (True, 4, {}),
}  # a fused head, the rank of an adapter, the batch


def compared(folder: Path) -> Iterator[tuple[str, dict]]:
    engines = {}
    for case, (fused, lora, options) in CASES.items():  # verl gives fused heads to the class
        path = {"attention": "varlen", "packed": True, "fused": fused}
        if (fused, lora) not in engines:
            engines[fused, lora] = [
                parity.engine(FSDPEngineWithLMHead, folder, path | {"attention": name}, rank=lora)
                for name in ("varlen", PROMPTS_ONCE)
            ]
        ways = engines[fused, lora]
        assert [prompts_once.applies(made, batch(path, 0)) for made in ways] == [False, True]
        theirs, ours = (computed(made, path, **{one_update.ON_POLICY: True} | options) for made in ways)
        yield (
            case,
            {
                "values": float((ours["values"] - theirs["values"]).abs().max()),
                "gradients": float((ours["gradients"] - theirs["gradients"]).norm() / theirs["gradients"].norm()),
                "loss": abs(ours["loss"] - theirs["loss"]),
                "passed": [theirs["passed"], ours["passed"]],
                "nested": ours["lengths"],
            },
        )


if __name__ == "__main__":
    write_found(compared)
