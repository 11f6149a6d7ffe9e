"""Mistral: Llama with a window on what every layer's queries see."""

from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names, usual
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    shape = config.shape()
    config.only(hidden_act="silu")
    absent = "sliding_window" not in config.values
    window = 4096 if absent else config.size("sliding_window", 0, least=0)
    return ModelSpec(
        name,
        **shape,
        **config.rope(shape["head_dim"]),
        sliding_windows=(window,) * shape["num_layers"] if window else (),
    )


def tensor_names(spec: ModelSpec) -> Names:
    return usual()
