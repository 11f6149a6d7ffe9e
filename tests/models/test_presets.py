"""Tests of preset shapes: parameter counts, fields, unknown names."""

import math

import jax
import pytest

from kvjax.models import decoder, presets
from kvjax.types import UserError

# Parameters in units of 1e9, as the models' authors count them.
PARAMETERS = {
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.02,
    "llama-2-70b": 68.98,
    "llama-3-8b": 8.03,
    "llama-3.1-8b": 8.03,
    "llama-3-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "mistral-7b": 7.24,
    "mixtral-8x7b": 46.70,
    "phi-3.5-mini": 3.82,
    "qwen2-7b": 7.62,
    "falcon-7b": 6.92,
    "opt-6.7b": 6.66,
    "gpt-neox-20b": 20.55,
}
# The config.json of meta-llama/Llama-2-*-hf, Meta-Llama-3-* and Meta-Llama-3.1-*,
# mistralai/Mistral-7B-v0.1 and Mixtral-8x7B-v0.1, microsoft/Phi-3.5-mini-instruct,
# Qwen/Qwen2-7B, tiiuae/falcon-7b, facebook/opt-6.7b and EleutherAI/gpt-neox-20b: the
# norms' epsilon (PyTorch's default for OPT), RoPE's base, the context, the activation,
# the window (Phi's of 262,144 is beyond its context).
PUBLISHED = {
    "llama-2-7b": (1e-5, 1e4, 4096, "silu", 0),
    "llama-2-13b": (1e-5, 1e4, 4096, "silu", 0),
    "llama-2-70b": (1e-5, 1e4, 4096, "silu", 0),
    "llama-3-8b": (1e-5, 5e5, 8192, "silu", 0),
    "llama-3-70b": (1e-5, 5e5, 8192, "silu", 0),
    "llama-3.1-8b": (1e-5, 5e5, 131_072, "silu", 0),
    "llama-3.1-405b": (1e-5, 5e5, 131_072, "silu", 0),
    "mistral-7b": (1e-5, 1e4, 32_768, "silu", 4096),
    "mixtral-8x7b": (1e-5, 1e6, 32_768, "silu", 0),
    "phi-3.5-mini": (1e-5, 1e4, 131_072, "silu", 0),
    "qwen2-7b": (1e-6, 1e6, 131_072, "silu", 0),
    "falcon-7b": (1e-5, 1e4, 2048, "gelu", 0),
    "opt-6.7b": (1e-5, None, 2048, "relu", 0),
    "gpt-neox-20b": (1e-5, 1e4, 2048, "gelu_tanh", 0),
}


@pytest.mark.parametrize("name", presets.CONFIGS)
def test_what_config_json_says(name):
    spec = presets.spec(name)
    theta = None if spec.positions == "learned" else spec.rope_theta
    window = spec.sliding_window(spec.num_layers - 1)
    found = spec.norm_eps, theta, spec.context_length, spec.activation, window
    assert found == PUBLISHED[name]


@pytest.mark.parametrize("name", presets.CONFIGS)
def test_parameters(name):
    shapes = decoder.param_shapes(presets.spec(name))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert count / 1e9 == pytest.approx(PARAMETERS[name], rel=2e-3)


def test_an_unknown_shape():
    with pytest.raises(UserError, match="no shape of 'gpt-4': one of falcon-7b"):
        presets.spec("gpt-4")
