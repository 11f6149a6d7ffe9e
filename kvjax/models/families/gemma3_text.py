"""Gemma 3, text: Gemma 2 without attention soft caps; local layers rotate faster."""

import dataclasses

from kvjax.models.families import gemma2
from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    pattern = config.size("_sliding_window_pattern", 6)
    pattern = config.size("sliding_window_pattern", pattern)
    config.ignore("attn_logit_softcapping")  # transformers does not apply it either
    local = config.number("rope_local_base_freq", 10_000.0)
    rope = config.part("rope_parameters")
    if "full_attention" in rope:
        nested = Config(rope, config.source).part("sliding_attention")
        local = Config(nested, config.source).number("rope_theta", local)
        rest = {key: value for key, value in nested.items() if key != "rope_theta"}
        if rest.pop("rope_type", "default") != "default" or rest:
            raise config.unsupported("sliding_attention", nested)
        config.values["rope_parameters"] = rope["full_attention"]
    config.absent(max_position_embeddings=131_072)
    fields = gemma2.shared(config, every=pattern)
    # In these checkpoints it already includes the scaling.
    fields["context_length"] = config.size("max_position_embeddings")
    return ModelSpec(
        name,
        **fields,
        **config.rope(fields["head_dim"], theta=1e6),
        local_rope_theta=float(local),
        qk_norm=True,
    )


def tensor_names(spec: ModelSpec) -> Names:
    norms = {f"{x}_norm": f"model.layers.{{i}}.self_attn.{x}_norm" for x in "qk"}
    names = gemma2.tensor_names(spec)
    return dataclasses.replace(names, layer={**names.layer, **norms})
