"""The config of a large model made small: its family, head, kinds of layers and head size, with few of each."""

import copy
import itertools
from collections.abc import Iterator

WIDTH, HEADS, MOST_LAYERS = 64, 4, 12
WINDOW = 8  # tokens, so that short sequences reach beyond it
# Sizes that families name for themselves. Those that must fit one another: 8 heads of 16 are a Mamba layer's width,
# twice WIDTH; a latent of 16 is read by heads of 8 turned and 16 other numbers (MLA).
SIZES = {
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_expand": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "ffn_dim": 96,
    "n_inner": 96,
    "first_k_dense_replace": 1,
}
WINDOWS = ("sliding_window", "attention_chunk_size")
# Of an encoder of pictures or sound, which text does not reach.
ENCODER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2}
ENCODER |= {"num_heads": 2, "num_key_value_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": WIDTH}


def small(config, vocabulary: int = 0, head: int = 0, heads: int = HEADS):
    """A small copy of transformers' ``config``.

    ``vocabulary``: tokens that it keeps, with every special token among them; 0: all. ``head``: numbers of an attention
    head; 0: as many as the model has. Raises AttributeError or ValueError for a config without the common fields.
    """
    config = copy.deepcopy(config)
    config.__dict__.pop("quantization_config", None)  # the weights will be plain
    for name, part in _parts(config):
        _set(part, **ENCODER) if _is_encoder(name) else _shrink(part, vocabulary, head, heads)
    return config


def _parts(config) -> Iterator[tuple[str, object]]:
    """The configs of the model's parts, else ``config`` itself."""
    parts = [(name, getattr(config, name, None)) for name in (getattr(config, "sub_configs", None) or {})]
    there = [(name, part) for name, part in parts if hasattr(part, "num_hidden_layers") or _is_encoder(name)]
    yield from there
    if all(_is_encoder(name) for name, _ in there):
        yield "", config


def _is_encoder(name: str) -> bool:
    return any(kind in name for kind in ("vision", "audio", "image", "video"))


def _set(config, **values) -> None:
    for name, value in values.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)


def _shrink(config, vocabulary: int, head: int, heads: int) -> None:
    attention, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    own = "head_dim" in vars(config) and not hasattr(config, "kv_lora_rank")
    head = head or getattr(config, "head_dim", None) or config.hidden_size // attention
    _keep_layers(config)
    config.num_attention_heads = heads
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = heads // 2 if keys and keys < attention else heads
    # Where heads have no size of their own, the width is theirs together.
    config.hidden_size = width = WIDTH if own else heads * head
    sizes = {**SIZES, "mamba_d_head": 2 * width // 8, "mamba_head_dim": 2 * width // 8, "mamba_d_ssm": 2 * width}
    sizes |= {name: width for name in ("hidden_dim", "word_embed_proj_dim", "lru_width")}
    sizes |= {"num_kv_heads": heads // 2, "global_head_dim": head, "num_kv_shared_layers": 0}
    if own:
        config.head_dim = head
    elif hasattr(config, "kv_lora_rank"):
        sizes |= {"head_dim": sizes["qk_rope_head_dim"], "qk_head_dim": 24}
    for name, size in sizes.items():
        before = vars(config).get(name)
        if isinstance(before, list):
            setattr(config, name, [size] * config.num_hidden_layers)
        elif before:  # 0 and None turn a part off
            setattr(config, name, min(size, before) if name in WINDOWS else size)
    if sparsity := getattr(config, "activation_sparsity_pattern", None):
        config.activation_sparsity_pattern = sparsity[: config.num_hidden_layers]
    # At 0.02 narrow layers hardly move a log-prob.
    for name in ("initializer_range", "init_std"):
        if hasattr(config, name):
            setattr(config, name, 1.2 * width**-0.5)
    if vocabulary:
        _keep_tokens(config, vocabulary)


def _keep_layers(config) -> None:
    """The first layer of each kind, in their order, and at least two. A list with one value for each layer tells the
    kind, as does one of layers' numbers; where a number of layers is a period, a whole period stays."""
    count = config.num_hidden_layers
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    numbers = {name: value for name, value in values.items() if _are_numbers_of_layers(name, value, count)}
    by_layer = {
        name: value
        for name, value in values.items()
        if name not in numbers
        and (isinstance(value, list | tuple) or (isinstance(value, str) and "pattern" in name))
        and len(value) == count > 2
    }
    kinds: dict[tuple, int] = {}
    for layer in range(count):
        kind = tuple(str(v[layer]) for v in by_layer.values()) + tuple(layer in v for v in numbers.values())
        kinds.setdefault(kind, layer)
    kept = sorted(kinds.values())[:MOST_LAYERS]
    if not by_layer and not numbers:
        periods = [v for n, v in values.items() if n.endswith(("_period", "_interval", "_step")) and type(v) is int]
        kept = list(range(min(count, MOST_LAYERS, max([2, *periods]))))
    while len(kept) < min(2, count):
        kept.append(next(layer for layer in range(count) if layer not in kept))
    for name, value in by_layer.items():
        chosen = [value[layer] for layer in kept]
        setattr(config, name, "".join(chosen) if isinstance(value, str) else type(value)(chosen))
    for name, value in numbers.items():
        setattr(config, name, [place for place, layer in enumerate(kept) if layer in value])
    config.num_hidden_layers = len(kept)
    _set(config, max_window_layers=min(getattr(config, "max_window_layers", 0) or 0, len(kept) // 2))


def _are_numbers_of_layers(name: str, value, count: int) -> bool:
    """Whether a field lists layers by their numbers: they rise, where values of each layer repeat."""
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < count for each in value):
        return False
    rising = all(a < b for a, b in itertools.pairwise(value))
    return rising and (len(value) > 2 or "layer" in name)


def _keep_tokens(config, vocabulary: int) -> None:
    """``vocabulary`` tokens; special ones have the numbers from the end on."""
    special, last = {}, vocabulary
    for name, value in list(vars(config).items()):
        if name.endswith(("token_id", "token_index")) and value is not None:
            first = value[0] if isinstance(value, list) and value else value
            if first not in special:
                last -= 1
                special[first] = last
            setattr(config, name, special[first])
    _set(config, vocab_size=vocabulary, vocab_size_per_layer_input=vocabulary)
