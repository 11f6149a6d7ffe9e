"""GPT-NeoX and Pythia: LayerNorm, biases, partly rotated heads."""

from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names
from kvjax.types import ModelSpec

_ACTIVATIONS = {"gelu": "gelu", "gelu_fast": "gelu_tanh", "gelu_new": "gelu_tanh"}


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    config.only(hidden_act=tuple(_ACTIVATIONS))
    activation = _ACTIVATIONS[config.get("hidden_act", "gelu")]
    part = config.number("rotary_pct", 0.0)
    base = config.number("rotary_emb_base", 10_000)
    rope = config.part("rope_parameters")
    part = part or rope.get("partial_rotary_factor", 0.25)
    config.values["rope_parameters"] = rope | {"partial_rotary_factor": part}
    shape = config.shape()
    shape["norm_eps"] = config.number("layer_norm_eps", 1e-5)
    parallel = config.flag("use_parallel_residual", True)
    biases = ("qkv", "out", "mlp") if config.flag("attention_bias", True) else ("mlp",)
    return ModelSpec(
        name,
        **shape,
        **config.rope(shape["head_dim"], theta=base, partial=True),
        norm="layer",
        norm_placement="parallel_two" if parallel else "pre",
        activation=activation,
        gated=False,
        biases=biases,
    )


def tensor_names(spec: ModelSpec) -> Names:
    layer = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "qkv": "attention.query_key_value",
        "out": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    }
    return Names(
        ends={
            "embed": "gpt_neox.embed_in",
            "final_norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
        },
        layer={part: "gpt_neox.layers.{i}." + name for part, name in layer.items()},
        grouped=True,
        dropped=("attention.bias", "attention.masked_bias"),
    )
