"""Tests of matmuls with weights: float32 sums, one rounding, few and many rows."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models import layers

RNG = np.random.default_rng(0)
ROWS = ((1,), (2,), (1, 1), (3, 5), (5, 13))
TYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def _operands(rows, dtype):
    x, weight = RNG.normal(size=(*rows, 48)), RNG.normal(size=(24, 48))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", TYPES)
def test_products_are_numpys_in_float64_rounded_once(rows, dtype):
    x, weight = _operands(rows, dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    wide = jax.jit(layers.wide_product)(x, weight)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, exact, rtol=1e-5, atol=1e-5)
    found = jax.jit(layers.product)(x, weight)
    assert found.dtype == dtype and found.shape == exact.shape
    half_a_step = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(
        np.asarray(found, np.float64), exact, rtol=half_a_step + 1e-6, atol=1e-5
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", [layers.product, layers.wide_product])
def test_a_cpu_is_asked_for_the_form_that_its_matrix_units_have(form, rows):
    """Float32 sums, rows in one axis, two at least, few with weights on the left."""
    x = jax.ShapeDtypeStruct((*rows, 512), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16)
    text = jax.jit(form).lower(x, weight).as_text()
    (found,) = re.findall(r"dot_general.*-> tensor<([0-9x]*)xf32>", text)
    count = math.prod(rows)
    few, many = f"2048x{max(2, count)}", f"{count}x2048"
    assert found == (few if count <= 64 else many)
    assert ("optimization_barrier" in text) == (count <= 64)
