"""What is sampled is what is trained: vLLM's weights agree with the trainer's after a sync.

The trainer's end (own_sockets.py) adds up each tensor as it sends it; vLLM's end adds up its own and writes them into
the launch's folder, for verl's collective_rpc returns nothing. Compared are the first sync and all until one in which
the trainer's weights had changed. Tensors that vLLM fuses or renames have no counterpart and do not count.
"""

import json
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

from verl_tasks.alive import launch_folder

LARGEST = 2**27  # numbers of a tensor: a copy of a larger one takes memory
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
ADAPTER = "lora_"
SHOWN = 3

Sums = dict[str, tuple[int, int]]  # of a tensor, by name: its numbers, and the sum of their bit patterns


class WeightSyncError(RuntimeError):
    """vLLM samples with other weights than the trainer's."""


def name_of(name: str) -> str:
    """What a tensor is called on both sides: from its layer on, if it is in one."""
    return name[name.find("layers.") :] if "layers." in name else name


def total(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the bit patterns: exact, whatever the order of the numbers; padding of zeros adds nothing."""
    return tensor.detach().contiguous().view(BITS[tensor.dtype]).sum(dtype=torch.int64)


def passing(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, scaling: float, sums: dict
) -> Iterator[tuple[str, torch.Tensor]]:
    """``weights`` as they are, with an entry in ``sums`` for each, of its numbers in vLLM's ``dtype``. vLLM keeps an
    adapter's second matrix times ``scaling``."""
    for name, tensor in weights:
        if tensor.numel() <= LARGEST and tensor.dtype in BITS:
            kept = tensor.detach().to(dtype)
            kept = kept * scaling if "lora_B" in name else kept
            sums[name_of(name)] = tensor.numel(), total(kept)
        yield name, tensor


def changes(model_type: str) -> list:
    """What transformers 5 changes in a checkpoint of a family of experts, if it has other names for parts of it
    (Mixtral, Phi-3.5-MoE); else nothing: vLLM knows what it does to the others."""
    found = get_checkpoint_conversion_mapping(model_type) or []
    return found if any(type(each) is WeightRenaming for each in found) else []  # its subclass changes a prefix


def as_published(weights: Iterable[tuple[str, torch.Tensor]], config) -> Iterator[tuple[str, torch.Tensor]]:
    """``weights`` as the checkpoints of their family name and cut them. ``config``: the model's."""
    model = SimpleNamespace(_weight_conversions=changes(config.model_type), config=config)
    for name, weight in weights:
        one = {name: weight}
        yield from (revert_weight_conversion(model, one) if model._weight_conversions else one).items()


def of_model(model: torch.nn.Module) -> Sums:
    """The sums of vLLM's own parameters."""
    found = {name_of(name): each for name, each in model.named_parameters() if each.dtype in BITS}
    return {name: (each.numel(), int(total(each.data))) for name, each in found.items()}


def of_adapter(layers: dict) -> Sums:
    """The sums of an adapter that vLLM has registered (vllm/lora/lora_model.py), without the matrices it has fused."""
    found: Sums = {}
    for module, layer in layers.items():
        for side, tensor in (("A", layer.lora_a), ("B", layer.lora_b)):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in BITS:
                found[name_of(f"{module}.{ADAPTER}{side}.weight")] = tensor.numel(), int(total(tensor))
    return found


def write(sums: Sums, replica: str, rank: int) -> None:
    """Leave the ``sums`` of a vLLM worker for the trainer on the same machine."""
    if folder := launch_folder():
        (folder / f"weights-{replica}-{rank}.json").write_text(json.dumps(sums))


def told(replica: int) -> list[Sums]:
    """What the workers of a replica have left."""
    files = sorted(folder.glob(f"weights-{replica}-*.json")) if (folder := launch_folder()) else []
    return [json.loads(file.read_text()) for file in files]


def compared(sent: Sums, workers: list[Sums]) -> dict[str, bool]:
    """Of each tensor that both sides have: is it the same? ``workers`` share a tensor, or each has all of it."""
    found = {}
    for name, (count, wanted) in sent.items():
        theirs = [each[name] for each in workers if name in each]
        if not theirs or len(theirs) < len(workers):
            continue
        counts, sums = zip(*theirs, strict=True)
        if all(each == count for each in counts):
            found[name] = all(each == wanted for each in sums)
        elif sum(counts) == count:
            found[name] = sum(sums) == wanted
    return found


class Agreement:
    """The syncs of a trainer with one replica. ``due``: the next sync is to be compared."""

    def __init__(self):
        self.due = True
        self._first: Sums = {}
        self._kept: set[str] = set()  # names that agreed at first: vLLM changes no others by itself

    def check(self, sent: Sums, workers: list[Sums], step: int | None) -> str:
        """Compare a sync; what to print, if anything. Raises WeightSyncError."""
        same = compared(sent, workers)
        if not same:
            self.due = False
            return "vLLM's weights are not compared with the trainer's: no tensor has the same name on both sides"
        if not self._first:
            self._first, self._kept = sent, {name for name in same if same[name]}
            wrong = [] if self._kept else list(same)
        else:
            wrong = [name for name in same if name in self._kept and not same[name]]
        if wrong:
            names = ", ".join(sorted(wrong)[:SHOWN])
            raise WeightSyncError(
                f"after step {step} vLLM samples with other weights than the trainer's: {len(wrong)} of {len(same)} "
                f"tensors differ ({names}); the samples would be another policy's"
            )
        changed = sum(name in self._kept and sent[name] != self._first.get(name) for name in same)
        if not changed:
            return ""
        self.due = False
        return f"vLLM has the trainer's weights after step {step}: {len(same)} tensors compared, {changed} had changed"
