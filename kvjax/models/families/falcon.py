"""Falcon: attention and MLP side by side; the 7B has one KV head, the 40B several."""

from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    if config.flag("alibi"):
        raise config.unsupported("alibi", True)
    config.only(activation="gelu")
    config.ignore("n_embed", "ff_factor", "num_ln_in_parallel_attn", "multi_query")
    heads, width = config.size("num_attention_heads"), config.size("hidden_size")
    new = config.flag("new_decoder_architecture")
    if new:
        kv_heads = config.size("num_kv_heads", heads)
        norms = config.number("num_ln_in_parallel_attn", 2)
        blocks = "parallel_two" if norms == 2 else "parallel"
    else:
        config.ignore("num_kv_heads")  # the old layouts use `multi_query` instead
        kv_heads = 1 if config.flag("multi_query", True) else heads
        blocks = "parallel" if config.flag("parallel_attn", True) else "pre"
    config.ignore("parallel_attn")
    return ModelSpec(
        name,
        num_layers=config.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        model_dim=width,
        ff_dim=config.size("ffn_hidden_size", 4 * width),
        vocab_size=config.size("vocab_size"),
        context_length=config.context_length(),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=config.flag("tie_word_embeddings", True),
        **config.rope(width // heads),
        norm="layer",
        norm_placement=blocks,
        activation="gelu",
        gated=False,
        biases=("qkv", "out", "mlp") if config.flag("bias") else (),
    )


def tensor_names(spec: ModelSpec) -> Names:
    layer = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "qkv": "self_attention.query_key_value",
        "out": "self_attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    }
    if spec.norm_placement == "parallel_two":
        layer |= {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    if spec.norm_placement == "parallel":
        del layer["mlp_norm"]
    return Names(
        ends={
            "embed": "transformer.word_embeddings",
            "final_norm": "transformer.ln_f",
            "head": "lm_head",
        },
        layer={part: "transformer.h.{i}." + name for part, name in layer.items()},
        grouped=True,
    )
