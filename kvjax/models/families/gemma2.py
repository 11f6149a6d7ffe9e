"""Gemma 2: norms around attention and MLP, soft-capped logits, local layers."""

from kvjax.models.families.hf_config import FULL, SLIDING, Config
from kvjax.models.families.names import Names, usual
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    config.absent(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    config.absent(max_position_embeddings=8192)
    fields = shared(config, every=2)
    cap = config.number("attn_logit_softcapping", 0.0)
    return ModelSpec(
        name,
        **fields,
        **config.rope(fields["head_dim"]),
        attention_softcap=float(cap),
    )


def shared(config: Config, every: int) -> dict:
    """Returns the `ModelSpec` fields that Gemma 2 and 3 share.

    Of `every` layers, the last has no window.
    """
    config.absent(tie_word_embeddings=True, head_dim=256, num_key_value_heads=4)
    fields = config.shape()
    config.only(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh")
    config.only(attention_bias=False, use_bidirectional_attention=False)
    size = config.size("sliding_window", 4096)
    config.only(sliding_window_size=size)
    layers = fields["num_layers"]
    usual = [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    return fields | {
        "norm": "rms_offset",
        "norm_placement": "sandwich",
        "activation": "gelu_tanh",
        "sliding_windows": config.windows(layers, size, usual),
        "query_scale": config.number("query_pre_attn_scalar", 256) ** -0.5,
        "logit_softcap": float(config.number("final_logit_softcapping", 0.0)),
        "embed_scale": fields["model_dim"] ** 0.5,
    }


def tensor_names(spec: ModelSpec) -> Names:
    return usual(
        attn_after="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_after="post_feedforward_layernorm",
    )
