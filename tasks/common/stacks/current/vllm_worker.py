"""verl's vLLM worker extension with the patches of shared_gpu.py: its import is what vLLM's worker needs."""

from tasks.common.verl_plugins import shared_gpu  # noqa: F401
from tasks.common.verl_plugins.own_sockets import OwnSocketExtension


class SharedGPUExtension(OwnSocketExtension):
    """Named by ``engine_kwargs.vllm.worker_extension_cls``; vLLM makes its worker class inherit from it."""
