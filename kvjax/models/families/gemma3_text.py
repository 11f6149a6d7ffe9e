"""Gemma 3, text: as Gemma 2 without capped scores; local layers rotate faster."""

import dataclasses

from kvjax.models.families import gemma2
from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names
from kvjax.types import ModelSpec


def spec_from_hf(config: Config, name: str) -> ModelSpec:
    pattern = config.get("sliding_window_pattern", None)
    pattern = pattern or config.get("_sliding_window_pattern", 6)
    fields = gemma2.shared(config, every=pattern)
    config.ignore("attn_logit_softcapping")  # transformers does not apply it either
    local = config.number("rope_local_base_freq", 10_000.0)
    rope = config.get("rope_parameters", None) or {}
    if "full_attention" in rope:
        nested = dict(rope.get("sliding_attention") or {})
        local = nested.pop("rope_theta", None) or local
        if (kind := nested.pop("rope_type", "default")) != "default" or nested:
            raise config.unsupported("sliding_attention", {"rope_type": kind, **nested})
        config.values["rope_parameters"] = rope["full_attention"]
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
