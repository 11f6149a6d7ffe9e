"""OPT: learned positions, LayerNorm, ReLU, biases everywhere."""

from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    config.only(activation_function="relu", output_projection=True)
    for key in ("enable_bias", "layer_norm_elementwise_affine"):
        if not config.flag(key, True):
            raise config.unsupported(key, False)
    heads, width = config.size("num_attention_heads"), config.size("hidden_size")
    before = config.flag("do_layer_norm_before", True)
    return ModelSpec(
        name,
        num_layers=config.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        model_dim=width,
        ff_dim=config.size("ffn_dim"),
        vocab_size=config.size("vocab_size"),
        context_length=config.size("max_position_embeddings", 2048),
        rope_theta=0.0,
        norm_eps=1e-5,
        tie_embeddings=config.flag("tie_word_embeddings", True),
        positions="learned",
        norm="layer",
        norm_placement="pre" if before else "post",
        final_norm=before and not config.flag("_remove_final_layer_norm"),
        activation="relu",
        gated=False,
        biases=("qkv", "out", "mlp"),
        embed_dim=config.size("word_embed_proj_dim", width),
    )


def tensor_names(spec: ModelSpec) -> Names:
    layer = {
        "attn_norm": "self_attn_layer_norm",
        **{part: f"self_attn.{part}_proj" for part in "qkv"},
        "out": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "up": "fc1",
        "down": "fc2",
    }
    return Names(
        ends={
            "embed": "model.decoder.embed_tokens",
            "positions": "model.decoder.embed_positions",
            "embed_in": "model.decoder.project_in",
            "embed_out": "model.decoder.project_out",
            "final_norm": "model.decoder.final_layer_norm",
            "head": "lm_head",
        },
        layer={
            part: "model.decoder.layers.{i}." + name for part, name in layer.items()
        },
        skipped_positions=2,
    )
