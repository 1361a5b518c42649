"""verl's vLLM worker extension with the patches of shared_gpu.py: its import is what vLLM's worker needs."""

import importlib

from verl.utils.vllm import patch

from verl_tasks.verl_plugins import shared_gpu  # noqa: F401
from verl_tasks.verl_plugins.own_sockets import OwnSocketExtension

importlib.reload(patch)  # the models that forked.py left out


class SharedGPUExtension(OwnSocketExtension):
    """Named by ``engine_kwargs.vllm.worker_extension_cls``; vLLM makes its worker class inherit from it."""
