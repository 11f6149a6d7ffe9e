"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names, usual
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
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
    """The window of each layer: named by `layer_types`, or from a layer onwards."""
    size = config.size("sliding_window", 0, least=0)
    first = config.size("max_window_layers", 28, least=0)
    kinds = config.layer_types(layers)
    if not config.flag("use_sliding_window") or not size:
        return ()
    if kinds is None:
        kinds = ["sliding_attention" if i >= first else "" for i in range(layers)]
    return tuple(size if kind == "sliding_attention" else 0 for kind in kinds)


def tensor_names(spec: ModelSpec) -> Names:
    return usual()
