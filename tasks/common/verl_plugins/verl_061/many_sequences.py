"""vLLM 0.11.0 with more sequences at once than max_model_len.

v1/worker/gpu_model_runner.py:438 makes a buffer of max_model_len rows, and line 4156 takes a row for each sequence.
"""

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from verl_tasks.training.torchrun import listen_locally
from verl_tasks.verl_plugins import shared_gpu  # noqa: F401
from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.reloading import Reloading

listen_locally()

expect(
    GPUModelRunner.__init__, "self.sampled_token_ids_pinned_cpu = torch.empty(\n            (self.max_model_len, 1),"
)
expect(GPUModelRunner._to_list, "pinned = self.sampled_token_ids_pinned_cpu[:sampled_token_ids.shape[0]]")

_init = GPUModelRunner.__init__


def __init__(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    rows = max(self.max_model_len, self.max_num_reqs)
    self.sampled_token_ids_pinned_cpu = torch.empty((rows, 1), dtype=torch.int64, pin_memory=self.pin_memory)


GPUModelRunner.__init__ = __init__


class ManySequences(Reloading):
    """Named by ``worker_extension_cls``: vLLM imports this module in the process of its worker, before it makes one."""
