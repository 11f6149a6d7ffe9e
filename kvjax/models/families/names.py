"""Names of a checkpoint's tensors: Hugging Face names by their role."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Names:
    """Tensor names of one family, without the suffix `.weight` or `.bias`.

    Attributes:
      ends: names of `embed`, `final_norm`, `head`, `positions`, `embed_in`,
        `embed_out`.
      layer: names of each layer's tensors, with `{i}` for its index: the norms and
        projections of `kvjax.models.decoder`, or `q`, `k` and `v`, and `gate` and `up`,
        where the checkpoint stores them separately. `{e}` is an expert's index.
      grouped: whether the rows of a fused `qkv` are ordered by KV head (its query
        heads, its key, its value), or as all queries, all keys, all values.
      skipped_positions: rows of `positions` before that of the first token.
      dropped: suffixes of tensors in early checkpoints that kvjax computes itself.
    """

    ends: Mapping[str, str]
    layer: Mapping[str, str]
    grouped: bool = False
    skipped_positions: int = 0
    dropped: tuple[str, ...] = ()


def usual(**changes: str | None) -> Names:
    """Returns Llama's names with changes; a name of None is left out."""
    attention = {part: f"self_attn.{part}_proj" for part in "qkv"}
    layer = {
        "attn_norm": "input_layernorm",
        **attention,
        "out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    layer = {part: name for part, name in (layer | changes).items() if name}
    return Names(
        ends={
            "embed": "model.embed_tokens",
            "final_norm": "model.norm",
            "head": "lm_head",
        },
        layer={part: "model.layers.{i}." + name for part, name in layer.items()},
    )
