"""Mistral: Llama with a sliding window in every layer."""

from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names, usual
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    config.absent(max_position_embeddings=131_072, num_key_value_heads=8)
    config.absent(sliding_window=4096)  # null is no window
    shape = config.shape()
    config.only(hidden_act="silu")
    window = config.size("sliding_window", 0, least=0)
    return ModelSpec(
        name,
        **shape,
        **config.rope(shape["head_dim"]),
        sliding_windows=config.windows(shape["num_layers"], window),
    )


def tensor_names(spec: ModelSpec) -> Names:
    return usual()
