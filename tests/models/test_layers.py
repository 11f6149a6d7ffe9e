"""Activations and rotary tables, against NumPy in float64, and made once a program."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_spec

from kvjax.cache.spec import make_spec
from kvjax.engine.compiled import programs
from kvjax.engine.jobs import Job, bucket
from kvjax.models import layers

RNG = np.random.default_rng(0)
_PHI = np.vectorize(lambda x: (1 + math.erf(x / math.sqrt(2))) / 2)
EXACT = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * _PHI(x),
    "gelu_tanh": lambda x: (
        x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "relu": lambda x: np.maximum(x, 0),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_activations_are_rounded_once(name, dtype):
    x = jnp.asarray(RNG.normal(size=4096) * 3, dtype)
    found = jax.jit(layers.activated, static_argnums=1)(x, name)
    assert found.dtype == dtype
    exact = EXACT[name](np.asarray(x, np.float64))
    half_a_step = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(
        np.asarray(found, np.float64), exact, rtol=half_a_step + 1e-5, atol=1e-5
    )


def test_tables_turn_by_the_angles():
    positions, frequencies = np.array([[0, 1, 7], [3, 4, 900]]), np.float32([1, 0.5])
    angles = positions[..., None] * np.tile(frequencies, 2).astype(np.float64)
    cos, sin = layers.rope_tables(jnp.asarray(positions), frequencies, scale=2.0)
    np.testing.assert_allclose(cos, 2 * np.cos(angles), atol=2e-6)
    np.testing.assert_allclose(sin, 2 * np.sin(angles), atol=2e-6)


def test_a_program_makes_the_tables_of_its_tokens_once():
    """Not again in every layer and for every head: on a CPU, a tenth of the time."""
    spec = tiny_spec(num_layers=3)
    config = make_spec(spec, "key_diff", 32)
    job = Job(spec, config, 2, bucket(spec, config, 64, 8), 8, "float32")
    made = programs(job)
    for program in (made.prefill, made.decode):
        assert program.as_text().count(" cosine(") == 1
