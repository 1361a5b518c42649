"""What the processes of a GPU training share, imported without starting CUDA: a fork of what started it has no GPU."""

import ctypes
import importlib
import sys

import torch
from vllm.platforms import current_platform

from tasks.common.verl_plugins import forked

# verl asks for the GPU's generation (trainer/constants_ppo.py), and torch starts CUDA to answer: here NVML does.
_by_cuda = torch.cuda.get_device_capability
torch.cuda.get_device_capability = lambda device=None: tuple(current_platform.get_device_capability(device or 0))
# vLLM's kernels of gated delta nets ask triton's driver. verl lists two models that need them (utils/vllm/patch.py),
# where vLLM has them: vllm_worker.py repeats that list.
KERNELS = "vllm.model_executor.layers.fla.ops"
sys.modules[KERNELS] = None  # an ImportError
for name in (*forked.IMPORTS, "vllm.v1.worker.gpu_worker"):
    importlib.import_module(name)
del sys.modules[KERNELS]
torch.cuda.get_device_capability = _by_cuda
# A fork closes its files, NVML's among them: it starts NVML anew.
if current_platform.is_cuda():
    _nvml = ctypes.CDLL("libnvidia-ml.so.1")
    while _nvml.nvmlShutdown() == 0:
        pass
