"""Shapes of published models, without their weights, for planning and benchmarks.

Each has those keys of the model's config.json that change the computation and differ
from the family's defaults. Phi-3.5's window of 262,144 tokens is left out: it is longer
than the context.
"""

from typing import Any

from kvjax.models.families import FAMILIES
from kvjax.models.families.hf_config import Config
from kvjax.types import ModelSpec, UserError

RANDOM = "random:"  # prefix of a shape's name: the model with random weights

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# LongRoPE factors of Phi-3.5-mini-instruct for contexts beyond the 4,096 tokens that it
# was first trained on, one for each of a head's 48 frequencies.
_PHI35_FACTORS = """
1.0800000429153442 1.1100000143051147 1.1399999856948853 1.340000033378601
1.5899999141693115 1.600000023841858 1.6200000047683716 2.620000123977661
3.2300000190734863 3.2300000190734863 4.789999961853027 7.400000095367432
7.700000286102295 9.09000015258789 12.199999809265137 17.670000076293945
24.46000099182129 28.57000160217285 30.420001983642578 30.840002059936523
32.590003967285156 32.93000411987305 42.320003509521484 44.96000289916992
50.340003967285156 50.45000457763672 57.55000305175781 57.93000411987305
58.21000289916992 60.1400032043457 62.61000442504883 62.62000274658203
62.71000289916992 63.1400032043457 63.1400032043457 63.77000427246094
63.93000411987305 63.96000289916992 63.970001220703125 64.02999877929688
64.06999969482422 64.08000183105469 64.12000274658203 64.41000366210938
64.4800033569336 64.51000213623047 64.52999877929688 64.83999633789062
"""
_PHI35_ROPE = {
    "type": "longrope",
    "long_factor": tuple(map(float, _PHI35_FACTORS.split())),
    "original_max_position_embeddings": 4096,
}


def _config(family, layers, width, ff, heads, kv_heads, vocab, context, **more):
    return {
        "architectures": [family],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": ff,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        **more,
    }


_L, _V3 = "LlamaForCausalLM", 128_256
_EPS = {"rms_norm_eps": 1e-5}  # where it is not 1e-6, transformers' default
_LLAMA3 = {"rope_theta": 5e5, **_EPS}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _config(_L, 32, 4096, 11008, 32, 32, 32_000, 4096, **_EPS),
    "llama-2-13b": _config(_L, 40, 5120, 13824, 40, 40, 32_000, 4096, **_EPS),
    "llama-2-70b": _config(_L, 80, 8192, 28672, 64, 8, 32_000, 4096, **_EPS),
    "llama-3-8b": _config(_L, 32, 4096, 14336, 32, 8, _V3, 8192, **_LLAMA3),
    "llama-3-70b": _config(_L, 80, 8192, 28672, 64, 8, _V3, 8192, **_LLAMA3),
    "llama-3.1-8b": _config(
        *(_L, 32, 4096, 14336, 32, 8, _V3, 131_072),
        rope_scaling=_LLAMA3_ROPE,
        **_LLAMA3,
    ),
    "llama-3.1-405b": _config(
        *(_L, 126, 16384, 53248, 128, 8, _V3, 131_072),
        rope_scaling=_LLAMA3_ROPE,
        **_LLAMA3,
    ),
    "mistral-7b": _config(
        *("MistralForCausalLM", 32, 4096, 14336, 32, 8, 32_000, 32_768),
        sliding_window=4096,
        **_EPS,
    ),
    "mixtral-8x7b": _config(
        *("MixtralForCausalLM", 32, 4096, 14336, 32, 8, 32_000, 32_768),
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_theta=1e6,
        **_EPS,
    ),
    "phi-3.5-mini": _config(
        *("Phi3ForCausalLM", 32, 3072, 8192, 32, 32, 32_064, 131_072),
        rope_scaling=_PHI35_ROPE,
        **_EPS,
    ),
    "qwen2-7b": _config(
        *("Qwen2ForCausalLM", 28, 3584, 18944, 28, 4, 152_064, 131_072), rope_theta=1e6
    ),
    "falcon-7b": {
        "architectures": ["FalconForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "vocab_size": 65_024,
        "multi_query": True,
        "parallel_attn": True,
    },
    "opt-6.7b": {
        "architectures": ["OPTForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "ffn_dim": 16384,
        "num_attention_heads": 32,
        "vocab_size": 50_272,
        "max_position_embeddings": 2048,
    },
    "gpt-neox-20b": _config(
        *("GPTNeoXForCausalLM", 44, 6144, 24576, 64, 64, 50_432, 2048),
        hidden_act="gelu_fast",
        rotary_pct=0.25,
    ),
}


def spec(name: str) -> ModelSpec:
    """Returns the shape of a published model.

    Raises:
      UserError: a name that is not in `CONFIGS`.
    """
    if name not in CONFIGS:
        raise UserError(f"no shape of {name!r}: one of {', '.join(sorted(CONFIGS))}")
    config = Config(CONFIGS[name], name)
    found = FAMILIES[CONFIGS[name]["architectures"][0]].spec_from_hf(config, name)
    config.finish()
    return found
