"""Where a checkpoint keeps its tensors: Hugging Face names by their role."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Names:
    """Tensor names of one family, without the ending `.weight` or `.bias`.

    Attributes:
      ends: of `embed`, `final_norm`, `head`, `positions`, `embed_in`, `embed_out`.
      layer: of each layer's parts, with `{i}` for its number: the norms and
        projections of `kvjax.models.decoder`, `q`, `k` and `v` where they are apart,
        `gate` and `up` likewise; experts have `{e}` for theirs.
      grouped: of a fused `qkv`, whether its rows go KV head by KV head (its query
        heads, its key, its value), or all queries, all keys, all values.
      skipped_positions: rows of `positions` before that of the first token.
      dropped: endings of tensors that early checkpoints carry and we compute.
    """

    ends: Mapping[str, str]
    layer: Mapping[str, str]
    grouped: bool = False
    skipped_positions: int = 0
    dropped: tuple[str, ...] = ()


def usual(**changes: str | None) -> Names:
    """Llama's names, which most families share; None leaves a part out."""
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
