"""The config.json of a trained model: without the attention that it was trained with."""

from collections.abc import Callable


def without_attention(update: Callable) -> Callable:
    """``update``, verl's update_model_config, without ``attn_implementation``.

    verl makes the config with it before. Written into config.json too, it would bind every program that loads the
    model to an attention which only our processes know, or to flash-attn.
    """

    def updated(module_config, override_config_kwargs: dict) -> None:
        kept = {name: value for name, value in override_config_kwargs.items() if name != "attn_implementation"}
        update(module_config, kept)

    return updated
