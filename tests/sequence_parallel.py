"""Sequences shared by two processes (SP=2) beside whole ones (SP=1), with verl 0.9.1's own FSDP engine of `current`.

    STACK=current python -m tests.benchmarks.many_gpus sp OUT.json     starts two of it with torchrun

Both take the same random model and the same packed sequences, and give log-probs, entropies and the gradients of verl's
SFT loss. With CUDA bfloat16 and torch's varlen kernel; sdpa in float32 on whole rows says how far from exact each is,
and SP=2 may be TOLERANCE times as far as SP=1. Without CUDA (STACK=cpu) float32, and sdpa in place of the kernel: all
are within ROUNDING.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import verl  # noqa: F401  (loads VERL_USE_EXTERNAL_MODULES)
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.distributed import initialize_global_process_group
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import sft_loss

from verl_tasks.verl_plugins import parity, varlen_attention
from verl_tasks.verl_plugins.reference_attention import reference_kernel

ON_GPU = torch.cuda.is_available()
TOLERANCE, ROUNDING = 1.2, 1e-5
# Query heads, heads of keys, whether embedding and output head are one matrix, the rank of an adapter: several heads of
# both kinds on each process; a key head that both need; as the models of 7B and more.
MODELS = {
    "4 key heads": (8, 4, True, 0),
    "1 key head": (6, 1, True, 0),
    "head of its own": (8, 4, False, 0),
    "head of its own, LoRA": (8, 4, False, 4),
}
LENGTHS = [7, 130, 2, 64, 301, 33, 200, 90] if ON_GPU else [7, 13, 2, 16, 31, 5, 20, 9]  # odd in all: one is added
PATHS = {
    True: {"attention": "sdpa", "packed": False, "fused": False},
    False: {"attention": "varlen", "packed": True, "fused": True},
}  # exact or not
VOCABULARY = 1000 if ON_GPU else 50
TOKENS = 700 if ON_GPU else 70  # of a pass on one GPU: more than one pass


def model(folder: Path, queries: int, keys: int, tied: bool) -> Path:
    """A random Qwen2 with so many heads."""
    size = 64 if ON_GPU else 8
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=queries * size,
        intermediate_size=4 * queries * size,
        num_hidden_layers=4 if ON_GPU else 2,
        num_attention_heads=queries,
        num_key_value_heads=keys,
        tie_word_embeddings=tied,
        initializer_range=0.1,  # at 0.02 attention would hardly move a log-prob
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def write_found(compared: Callable[[Path], Iterable[tuple[str, dict]]]) -> None:
    """What a program of ``helpers.by_torchrun`` does: all that ``compared`` finds of a small model, with references of
    the GPU's kernels, goes to the program's folder, a file for each process."""
    initialize_global_process_group()
    parity.take_references()
    folder = Path(sys.argv[1])
    if dist.get_rank() == 0:
        model(folder / "model", 4, 2, True)
    dist.barrier()
    found = dict(compared(folder / "model"))
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


def engine(folder: Path, shared: int, exact: bool, rank: int) -> FSDPEngineWithLMHead:
    """verl's engine as the overrides of `current` make it, ``exact``: without its kernels, in float32."""
    dtype = "fp32" if exact or not ON_GPU else "bf16"
    return parity.engine(FSDPEngineWithLMHead, folder, PATHS[exact], shared=shared, dtype=dtype, rank=rank)


def batch(made: FSDPEngineWithLMHead) -> TensorDict:
    """The sequences of this process: all with SP=2, every second one without."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    rows = rows[made.get_data_parallel_rank() :: made.get_data_parallel_size()]
    exact = not made.model_config.use_fused_kernels
    return parity.batch(rows, PATHS[exact], TOKENS, temperature=1.0).to(get_device_name())


def values(made: FSDPEngineWithLMHead) -> dict[str, torch.Tensor]:
    """``log_probs`` and ``entropy`` of every token but each sequence's last, and ``gradients``; float64, on the CPU."""
    data = batch(made)
    with made.eval_mode():
        output = made.infer_batch(data)["model_output"]
    found = {}
    for name in ("log_probs", "entropy"):
        rows = [row[:-1].double().cpu() for row in output[name].unbind()]
        every: list = [None] * dist.get_world_size()
        dist.all_gather_object(every, rows)
        copies = made.get_data_parallel_size()
        order = [every[n % copies][n // copies] for n in range(len(LENGTHS))]
        found[name] = torch.cat(order)
    with made.train_mode():
        made.forward_backward_batch(data, partial(sft_loss, None))
        trained = [p.grad for p in made.module.parameters() if p.requires_grad]
        gradients = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in trained]
        found["gradients"] = torch.cat([gradient.flatten().double().cpu() for gradient in gradients])
    return found


def distance(some: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, float]:
    """Norm of the difference, relative to the norm of ``right``."""
    return {name: float((some[name] - right[name]).norm() / right[name].norm()) for name in right}


def holds(errors: dict[str, dict[str, float]]) -> bool:
    """Whether shared sequences give what whole ones give, by the ``errors`` of main()."""
    if not ON_GPU:
        return all(error < ROUNDING for of_pair in errors.values() for error in of_pair.values())
    whole, shared = errors["SP=1 from exact"], errors["SP=2 from exact"]
    return all(shared[name] <= TOLERANCE * whole[name] for name in whole)


def main() -> None:
    initialize_global_process_group()
    if not ON_GPU:
        varlen_attention.varlen_attn = reference_kernel
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: model(Path(folder) / name, *shape) for name, (*shape, _) in MODELS.items()}
        # First all without fused kernels: verl gives these to the class.
        passes = [(1, True), (1, False), (2, False)]
        computed = [
            {name: values(engine(path, *each, MODELS[name][-1])) for name, path in paths.items()} for each in passes
        ]
    device = get_torch_device().get_device_name() if ON_GPU else "cpu"
    result = {"device": device, "torch": torch.__version__, "models": MODELS, "tolerance": TOLERANCE, "relative": {}}
    for name in MODELS:
        exact, whole, shared = (of_pass[name] for of_pass in computed)
        pairs = {"SP=2 from SP=1": (shared, whole), "SP=1 from exact": (whole, exact)}
        pairs |= {"SP=2 from exact": (shared, exact)}
        result["relative"][name] = {pair: distance(*both) for pair, both in pairs.items()}
    result["holds"] = all(map(holds, result["relative"].values()))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result))
    dist.destroy_process_group()
    sys.exit(not result["holds"])


if __name__ == "__main__":
    main()
