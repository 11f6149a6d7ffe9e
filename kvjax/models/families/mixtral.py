"""Mixtral: Mistral with eight experts, of which every token uses two."""

from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names, usual
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    config.absent(max_position_embeddings=131_072, num_key_value_heads=8)
    config.absent(rms_norm_eps=1e-5)
    shape = config.shape()
    config.only(hidden_act="silu")
    window = config.size("sliding_window", 0, least=0)
    experts = config.size("num_local_experts", 8)
    chosen = config.size("num_experts_per_tok", 2)
    if chosen > experts:
        what = f"has num_experts_per_tok = {chosen} for {experts} num_local_experts"
        raise config.error(what, f"it must be {experts} at most")
    return ModelSpec(
        name,
        **shape,
        **config.rope(shape["head_dim"], theta=1e6),
        sliding_windows=config.windows(shape["num_layers"], window),
        experts=experts,
        experts_per_token=chosen,
    )


def tensor_names(spec: ModelSpec) -> Names:
    expert = "block_sparse_moe.experts.{e}."
    return usual(
        router="block_sparse_moe.gate",
        gate=expert + "w1",
        up=expert + "w3",
        down=expert + "w2",
    )
