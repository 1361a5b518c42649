"""vLLM's worker on a GPU that other trainings use too (`make experiment JOBS=`).

It measures the free memory of the whole GPU (vllm/v1/worker/gpu_worker.py of 0.11.0 and 0.24.0). Memory that another
program takes while this one falls asleep stops it. Memory that another takes or frees during its profiling stops it, or
changes its KV cache.
"""

import os

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
    """Bytes for the KV cache: a fixed part of its share where the GPU is shared, else what vLLM's profile leaves."""
    if os.environ.get(SHARED) and not self.cache_config.kv_cache_memory_bytes:
        self.cache_config.kv_cache_memory_bytes = int(KV_CACHE * self.requested_memory)
    return _determine_available_memory(self)


Worker.sleep = sleep
Worker.determine_available_memory = determine_available_memory
