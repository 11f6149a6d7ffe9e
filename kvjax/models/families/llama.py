"""Llama 1 to 3.x, SmolLM, Yi, and others of the same shape."""

from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names, usual
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    shape = config.shape()
    config.only(hidden_act="silu", pretraining_tp=1)
    biases = ("qkv", "out") if config.flag("attention_bias") else ()
    if config.flag("mlp_bias"):
        biases = (*biases, "mlp")
    return ModelSpec(name, **shape, **config.rope(shape["head_dim"]), biases=biases)


def tensor_names(spec: ModelSpec) -> Names:
    return usual()
