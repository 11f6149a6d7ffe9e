"""Qwen3: Llama with queries and keys normalised per head."""

from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names, usual
from kvjax.models.families.qwen2 import windows
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    config.absent(max_position_embeddings=32_768, num_key_value_heads=32)
    config.absent(head_dim=128)
    shape = config.shape()
    config.only(hidden_act="silu")
    return ModelSpec(
        name,
        **shape,
        **config.rope(shape["head_dim"]),
        sliding_windows=windows(config, shape["num_layers"]),
        biases=("qkv", "out") if config.flag("attention_bias") else (),
        qk_norm=True,
    )


def tensor_names(spec: ModelSpec) -> Names:
    return usual(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
