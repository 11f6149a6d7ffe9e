"""Phi-3, Phi-3.5 and Phi-4: fused projections, LongRoPE, partly rotated heads.

LongRoPE has one set of frequencies for contexts up to the trained one and another for
longer ones, and transformers chooses by the length of each call. Keys are stored
rotated, so kvjax uses one set for a loaded model: that of the model's full context, or,
with `kvjax.load(..., context=4096)`, that of the context given there.
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
    if rope.get("type") == "yarn":  # the name of LongRoPE in early Phi-3 checkpoints
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
