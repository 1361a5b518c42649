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

    There torch gives back unused blocks before it takes more than the share.
    """
    if os.environ.get(SHARED) and not self.cache_config.kv_cache_memory_bytes:
        self.cache_config.kv_cache_memory_bytes = int(KV_CACHE * self.requested_memory)
        share = self.requested_memory / self.init_snapshot.total_memory
        torch.cuda.memory._set_allocator_settings(f"garbage_collection_threshold:{share:.3f}")
        torch.cuda.set_per_process_memory_fraction(1.0)  # without a fraction the threshold does nothing
    return _determine_available_memory(self)


Worker.sleep = sleep
Worker.determine_available_memory = determine_available_memory
