"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from kvjax.models.families.hf_config import FULL, SLIDING, Config
from kvjax.models.families.names import Names, usual
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    config.absent(max_position_embeddings=32_768, num_key_value_heads=32)
    shape = config.shape()
    config.only(hidden_act="silu")
    return ModelSpec(
        name,
        **shape,
        **config.rope(shape["head_dim"]),
        sliding_windows=windows(config, shape["num_layers"]),
        biases=("qkv",),
    )


def windows(config: Config, layers: int) -> tuple[int, ...]:
    """Returns the window of each layer.

    `layer_types` names the layers with a window, else `max_window_layers` is the first.
    """
    config.absent(sliding_window=4096)  # null is no window
    size = config.size("sliding_window", 0, least=0)
    first = config.size("max_window_layers", 28, least=0)
    if not config.flag("use_sliding_window"):
        size = 0
    usual = [SLIDING if size and i >= first else FULL for i in range(layers)]
    return config.windows(layers, size, usual)


def tensor_names(spec: ModelSpec) -> Names:
    return usual()
