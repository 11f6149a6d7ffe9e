"""Shapes of published models: their parameters, and names that are not there."""

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


@pytest.mark.parametrize("name", presets.CONFIGS)
def test_parameters(name):
    shapes = decoder.param_shapes(presets.spec(name))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert count / 1e9 == pytest.approx(PARAMETERS[name], rel=2e-3)


def test_an_unknown_shape():
    with pytest.raises(UserError, match="no shape of 'gpt-4': one of falcon-7b"):
        presets.spec("gpt-4")
