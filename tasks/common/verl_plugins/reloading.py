"""What our evaluation needs in the process of vLLM's worker."""

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


class Reloading:
    """Named by ``worker_extension_cls``: vLLM makes its worker class inherit from it."""

    def take_weights(self, model: str) -> None:
        """Load the weights of the folder or hub id ``model``, which must have this engine's shapes, in place."""
        self.model_runner.model_config.model = model  # where reload_weights looks; in vLLM 0.11.0 it takes no path
        self.reload_weights()
        # On a CPU a head tied to the embedding keeps the packed copy that it was made with: reload_weights packs anew
        # what the checkpoint names (vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm).
        for layer in self.model_runner.model.modules():
            if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
