"""verl's vLLM worker extension on a CPU: keeps the weights that vLLM would free after packing them."""

from vllm.model_executor.layers import linear, utils

from verl_tasks.verl_plugins.cpu import sampling as sampler  # noqa: F401
from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.own_sockets import OwnSocketExtension

# vllm/model_executor/layers/linear.py:215 packs a weight for oneDNN and replaces the original by an empty tensor.
# verl's next weight sync then finds no parameter of that shape to load into.
expect(
    linear.UnquantizedLinearMethod.process_weights_after_loading,
    "from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm",
    "dispatch_cpu_unquantized_gemm(layer, remove_weight=True)",
)
# A convolution's weight it packs in place, into another shape; Mamba's layers go on reading the original.
expect(utils.dispatch_cpu_unquantized_gemm, "layer.weight.data = ops.causal_conv1d_weight_pack(unpacked)")
_dispatch = utils.dispatch_cpu_unquantized_gemm


def _keep_weight(layer, remove_weight):
    if layer.weight.ndim == 3:
        layer.not_packed = layer.weight.data
    return _dispatch(layer, remove_weight=False)


utils.dispatch_cpu_unquantized_gemm = _keep_weight


class CPUColocateWorkerExtension(OwnSocketExtension):
    """Named by ``engine_kwargs.vllm.worker_extension_cls``; vLLM makes its worker class inherit from it."""

    def update_weights_from_ipc(self, *args, **kwargs):
        """verl's, which loads into the originals, and then packs."""
        for layer in self.model_runner.model.modules():
            if hasattr(layer, "not_packed"):
                layer.weight.data = layer.not_packed
        return super().update_weights_from_ipc(*args, **kwargs)
