"""What our evaluation needs in the process of vLLM's worker."""


class Reloading:
    """Named by ``worker_extension_cls``: vLLM makes its worker class inherit from it."""

    def take_weights(self, model: str) -> None:
        """Load the weights of the folder or hub id ``model``, which must have this engine's shapes, in place."""
        self.model_runner.model_config.model = model  # where reload_weights looks; in vLLM 0.11.0 it takes no path
        self.reload_weights()
