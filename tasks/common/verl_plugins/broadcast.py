"""Weights from GPUs that train to GPUs that sample (ASYNC=separate), by torch.distributed alone.

verl 0.9.1's own engines of this kind need CuPy or NIXL, which no stack has, and a GPU. verl imports this where
checkpoint_engine.custom_backend_module names it. Names and shapes go through a TCPStore, as JSON; tensors are broadcast
one after the other, by NCCL between GPUs and by gloo between CPUs.
"""

import json
from collections.abc import Iterable, Iterator
from datetime import timedelta

import ray
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name, get_torch_device

BACKEND = "broadcast"
TIMEOUT = timedelta(minutes=10)
LAST = "last"


def header(name: str, tensor: torch.Tensor) -> str:
    """What a receiver must know of ``tensor`` before it comes."""
    return json.dumps([name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]])


def empty(text: str, device) -> tuple[str, torch.Tensor]:
    """The name and an empty tensor for the ``header`` that is ``text``. Raises ValueError for what is none."""
    name, dtype, shape = json.loads(text)
    if not isinstance(found := getattr(torch, str(dtype), None), torch.dtype):
        raise ValueError(f"{str(name)[:80]}: {str(dtype)[:80]} is no type of numbers")
    return name, torch.empty(shape, dtype=found, device=device)


@CheckpointEngineRegistry.register(BACKEND)
class Broadcast(CheckpointEngine):
    """Rank 0 of the trainer sends, every process beside a vLLM receives. The group stays from update to update."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._is_master, self._group, self._store = is_master, None, None
        self._updates, self._sent = 0, 0

    def prepare(self) -> dict | None:
        """Of the sender: where its store listens."""
        if not self._is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = self._store or TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return {"host": host, "port": self._store.port}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]):
        """The arguments of ``init_process_group`` for the processes that train, and for those that receive."""
        size = rollout_world_size + 1
        ranks = [0, *[-1] * (actor_wg_world_size - 1)], [*range(1, size)]
        return tuple({"rank": own, "size": [size] * len(own), "sender": [metadata[0]] * len(own)} for own in ranks)

    def init_process_group(self, rank: int, size: int, sender: dict) -> None:
        """Join the group once; rank -1 stays out of it."""
        self._rank = rank
        if rank < 0 or self._group:
            return
        self._store = self._store or TCPStore(sender["host"], sender["port"], is_master=False, timeout=TIMEOUT)
        among = PrefixStore("group", self._store)
        if get_device_name() == "cpu":
            self._group = ProcessGroupGloo(among, rank, size, TIMEOUT)
        else:
            from torch.distributed import ProcessGroupNCCL  # torch for CPUs has none

            options = ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group = ProcessGroupNCCL(among, rank, size, options)

    def finalize(self) -> None:
        """After all have them: forget the names of this update. The next has other keys in the store."""
        for number in range(1, self._sent + 1):
            self._store.delete_key(self._key(number))
        self._sent, self._updates = 0, self._updates + 1

    def _key(self, number: int) -> str:
        return f"{self._updates}/{number}"

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Each trainer runs through ``weights``, which it gathers with the others; the first sends them."""
        number = 0
        for number, (name, tensor) in enumerate(weights, 1):
            if self._rank == 0:
                self._store.set(self._key(number), header(name, tensor))
                self._group.broadcast(tensor.detach().contiguous(), 0).wait()
        if self._rank == 0:
            self._sent = number + 1
            self._store.set(self._key(self._sent), LAST)
            get_torch_device().synchronize()

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by name, one at a time."""
        device, number = get_torch_device().current_device(), 1
        while (text := self._store.get(self._key(number)).decode()) != LAST:
            name, tensor = empty(text, device)
            self._group.broadcast(tensor, 0).wait()
            yield name, tensor
            number += 1
