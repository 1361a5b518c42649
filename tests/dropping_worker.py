"""vLLM's worker of the cpu stack, with a fault: after the first sync it drops the trainer's weights."""

from verl_tasks.verl_plugins.cpu.kept_weights import CPUColocateWorkerExtension


class DroppingExtension(CPUColocateWorkerExtension):
    """Named by ``engine_kwargs.vllm.worker_extension_cls`` in ARGS."""

    _syncs = 0

    def update_weights_from_ipc(self, *args, **kwargs):
        type(self)._syncs += 1
        super().update_weights_from_ipc(*args, **kwargs)

    def _update_weights(self, weights, *args, **kwargs):
        if self._syncs == 1:
            super()._update_weights(weights, *args, **kwargs)
