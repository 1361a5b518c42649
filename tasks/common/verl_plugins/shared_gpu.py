"""vLLM's worker on a GPU that other trainings use too (`make experiment JOBS=`).

It measures the free memory of the whole GPU (vllm/v1/worker/gpu_worker.py of 0.11.0 and 0.24.0). Memory that another
program takes while this one falls asleep stops it. Memory that another takes or frees during its profiling stops it, or
changes its KV cache. And torch keeps freed blocks of logits, of another size for each number of requests, until the
whole GPU is full, which fails the others.
"""

import os

import torch
from vllm.v1.worker.gpu_worker import Worker

from verl_tasks.machine.hardware import KV_CACHE
from verl_tasks.verl_plugins.expect import expect

SHARED = "SHARED_GPU"  # set by launch/experiments.py
GRAPHS = 2 * 2**30  # bytes for CUDA graphs of a small model

expect(Worker.sleep, 'assert freed_bytes >= 0, "Memory usage increased after sleeping."')
expect(Worker.determine_available_memory, "if kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes:")

_sleep = Worker.sleep
_determine_available_memory = Worker.determine_available_memory


def sleep(self, level: int = 1) -> None:
    """vLLM's, without its last check: its own memory is already free."""
    try:
        _sleep(self, level)
    except AssertionError as error:
        if "Memory usage increased after sleeping" not in str(error):
            raise


def determine_available_memory(self) -> int:
    """Bytes for the KV cache: a fixed part of its share where the GPU is shared, else what vLLM's profile leaves.

    There torch holds at most the KV cache and twice what the profile took (weights, activations): it gives back unused
    blocks before it takes more. verl 0.6.1 trains in this process too, which takes more than that.
    """
    if not os.environ.get(SHARED) or self.cache_config.kv_cache_memory_bytes:
        return _determine_available_memory(self)
    self.cache_config.kv_cache_memory_bytes = int(KV_CACHE * self.requested_memory)
    available = _determine_available_memory(self)
    if os.environ.get("STACK") != "a100":
        most = self.cache_config.kv_cache_memory_bytes + 2 * torch.cuda.max_memory_allocated() + GRAPHS
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / self.init_snapshot.total_memory))
    return available


Worker.sleep = sleep
Worker.determine_available_memory = determine_available_memory
