"""verl 0.9.1 on a CPU, through verl's own extension points.

VERL_USE_EXTERNAL_MODULES (stacks/cpu) loads it into the driver and every Ray and vLLM process. It registers a platform
and two engines. Each patch names the line of verl that it changes; ``expect`` stops the run when that line is gone.
"""

import contextlib
import gc
import os
import resource
import types

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_tasks.verl_plugins.expect import expect

# A dozen processes import some 6,000 modules each, whose objects Python would traverse again and again.
gc.set_threshold(100_000, 20, 50)


class _CPUDevice(str):
    """verl uses current_device() both as ``tensor.to(x)`` and in ``f"cpu:{x}"``: "cpu", formatted as 0."""

    def __format__(self, spec: str) -> str:
        return "0"


def _device_module() -> types.ModuleType:
    """torch.cpu with the memory and RNG functions that verl calls on every device module."""
    module = types.ModuleType("verl_cpu_device")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})

    for name in ("empty_cache", "ipc_collect", "synchronize", "set_device", "reset_peak_memory_stats"):
        setattr(module, name, lambda *_, **__: None)
    module.memory_allocated = module.memory_reserved = lambda *_: psutil.Process().memory_info().rss
    module.max_memory_allocated = module.max_memory_reserved = lambda *_: (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    module.mem_get_info = lambda *_: (psutil.virtual_memory().free, psutil.virtual_memory().total)
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    module.get_rng_state, module.set_rng_state = torch.get_rng_state, torch.set_rng_state
    module.get_device_name = lambda *_: "cpu"
    module.current_device = lambda: _CPUDevice("cpu")
    return module


def _always(value):
    """A method that returns ``value``."""
    return lambda self, *_, **__: value


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One CPU process plays one GPU: gloo, no IPC (weights reach vLLM through shared memory)."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    set_device = synchronize = set_allocator_settings = empty_cache = _always(None)
    profiler_start = profiler_stop = cudart = _always(None)
    is_available, is_ipc_supported = _always(True), _always(False)
    current_device, get_device_capability = _always(_CPUDevice("cpu")), _always((None, None))
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    communication_backend_name = _always("gloo")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")  # what Ray sets for its "GPU" resource
    ray_resource_name = _always("GPU")  # satisfied by ray_init.num_gpus, see stacks/cpu
    ray_noset_envvars = _always([])
    nvtx_range = _always(contextlib.nullcontext())

    def device_count(self):
        return int(os.environ.get("N_GPUS", 1))


# ---- verl/utils/distributed.py:63,89 build "cpu:gloo,cpu:gloo", which torch refuses --------------------------------

import verl.utils.distributed as verl_distributed  # noqa: E402  (needs the platform above)

for _function in (
    verl_distributed.initialize_global_process_group,
    verl_distributed.initialize_global_process_group_ray,
):
    expect(_function, 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"', "torch.distributed.init_process_group(")

_init_process_group = torch.distributed.init_process_group


def _init_process_group_once_per_device(backend=None, *args, **kwargs):
    return _init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = _init_process_group_once_per_device


# ---- verl/workers/engine/fsdp/transformer_impl.py registers its engines for cuda and npu only ----------------------

from torch.distributed.fsdp import OffloadPolicy  # noqa: E402
from verl.utils import torch_functional  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp import transformer_impl  # noqa: E402

from verl_tasks.verl_plugins.cpu.shared_prompts import SharedPrompts  # noqa: E402

expect(transformer_impl.FSDPEngine._build_fsdp_module, "offload_policy = CPUOffloadPolicy(pin_memory=True)")
expect(torch_functional.logprobs_from_logits_v2, "torch.logsumexp(logit, dim=-1) for logit in logits")


def _log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of ``labels`` (...) under ``logits`` (..., vocabulary): one operation, where verl's has several for each token,
    and takes five times as long."""
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return -flat.view(labels.shape)


torch_functional.logprobs_from_logits_v2 = _log_probs

# ---- verl/utils/fsdp_utils.py:1180: what is in RAM already is kept as it is, not as it was (ASYNC=separate) ----------

from verl.utils import fsdp_utils  # noqa: E402

expect(fsdp_utils.fsdp2_sharded_save_to_cpu, "local_cpu_tensor = local_gpu_tensor.detach().cpu()")

_sharded_save = fsdp_utils.fsdp2_sharded_save_to_cpu


def _copied(model):
    """verl's weights of ``model``, as copies: the next update would change them."""
    shards, spec = _sharded_save(model)
    return {name: (shard.clone(), own) for name, (shard, own) in shards.items()}, spec


fsdp_utils.fsdp2_sharded_save_to_cpu = _copied

# ---- verl/workers/engine/fsdp/transformer_impl.py:1491,1493: the entropy of all sequences at once, padded -----------

expect(transformer_impl.FSDPEngineWithLMHead.prepare_model_outputs, "checkpoint(verl_F.entropy_from_logits, logits)")

_entropy = torch_functional.entropy_from_logits


def _entropy_in_parts(logits: torch.Tensor) -> torch.Tensor:
    """verl's, of ``logits`` (..., vocabulary), 256 tokens at a time: it copies its input, 1.2 GB by default."""
    parts = logits.flatten(0, -2).split(256)
    return torch.cat([_entropy(part) for part in parts]).view(logits.shape[:-1])


torch_functional.entropy_from_logits = _entropy_in_parts


# ---- verl/workers/engine/fsdp/transformer_impl.py:462 offloads the reference model to pinned host memory -----------
# It is in host memory already, and torch pins nothing without an accelerator.

transformer_impl.CPUOffloadPolicy = lambda pin_memory: OffloadPolicy()


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cpu"])
class CPUEngineWithLMHead(SharedPrompts, transformer_impl.FSDPEngineWithLMHead):
    """verl's FSDP actor and reference engine."""

    def prepare_model_outputs(self, output, *args, **kwargs):
        # Autocast computes softmax in float32 on CUDA, in bfloat16 on a CPU: ratios would be off by 1 %.
        output.logits = output.logits.float()
        return super().prepare_model_outputs(output, *args, **kwargs)


EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device=["cpu"])(
    transformer_impl.FSDPEngineWithValueHead
)
