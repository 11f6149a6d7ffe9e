"""Mixtral: Mistral with eight MLPs, of which every token uses two."""

from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names, usual
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    shape = config.shape()
    config.only(hidden_act="silu")
    window = config.number("sliding_window", 0)
    return ModelSpec(
        name,
        **shape,
        **config.rope(shape["head_dim"], theta=1e6),
        sliding_windows=(window,) * shape["num_layers"] if window else (),
        experts=config.number("num_local_experts", 8),
        experts_per_token=config.number("num_experts_per_tok", 2),
    )


def tensor_names(spec: ModelSpec) -> Names:
    expert = "block_sparse_moe.experts.{e}."
    return usual(
        router="block_sparse_moe.gate",
        gate=expert + "w1",
        up=expert + "w3",
        down=expert + "w2",
    )
