"""Phi-3, Phi-3.5 and Phi-4: fused projections, LongRoPE, partly rotated heads.

LongRoPE has one set of frequencies for contexts up to the one trained on and one for
longer ones, and transformers takes the one that a call's length asks for. Keys are
stored rotated, so a run has to keep to one: that of the whole context, or, with
`kvjax.load(..., context=4096)`, that of the tokens which the model will be used for.
"""

from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names, usual
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    config.absent(max_position_embeddings=4096, rms_norm_eps=1e-5)
    config.absent(original_max_position_embeddings=4096)
    shape = config.shape()
    config.only(hidden_act="silu", full_attn_mod=1, interpolate_factor=1)
    window = config.size("sliding_window", 0, least=0)
    rope = config.part("rope_scaling")
    if rope.get("type") == "yarn":  # what early Phi-3 checkpoints call LongRoPE
        config.values["rope_scaling"] = {**rope, "type": "longrope"}
    return ModelSpec(
        name,
        **shape,
        **config.rope(shape["head_dim"], partial=True),
        sliding_windows=config.windows(shape["num_layers"], window),
    )


def tensor_names(spec: ModelSpec) -> Names:
    fused = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
    return usual(q=None, k=None, v=None, gate=None, up=None, **fused)
