"""Products with weights: summed in float32, rounded once, in either number of rows."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models import decoder, layers

RNG = np.random.default_rng(0)
ROWS = ((1,), (2,), (1, 1), (3, 5))
TYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def _operands(rows, dtype):
    x, weight = RNG.normal(size=(*rows, 48)), RNG.normal(size=(48, 24))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", TYPES)
def test_products_are_numpys_in_float64_rounded_once(rows, dtype):
    x, weight = _operands(rows, dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    wide = jax.jit(layers.wide_product)(x, weight)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, exact, rtol=1e-5, atol=1e-5)
    found = jax.jit(layers.product)(x, weight)
    assert found.dtype == dtype and found.shape == exact.shape
    half_a_step = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(
        np.asarray(found, np.float64), exact, rtol=half_a_step + 1e-6, atol=1e-5
    )


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_tied_head_multiplies_with_the_embeddings_rows(rows, dtype):
    x, weight = _operands((rows,), dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    for form in (decoder._tied_head, decoder._tied_head_rows_first):
        found = jax.jit(form)(x, weight.T)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_a_cpu_is_asked_for_the_form_that_its_matrix_units_have(rows):
    x = jax.ShapeDtypeStruct((*rows, 512), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16)
    text = jax.jit(layers.product).lower(x, weight).as_text()
    (products,) = re.findall(r"dot_general.*-> tensor<([0-9x]*)x2048xf32>", text)
    assert math.prod(map(int, products.split("x"))) == max(2, math.prod(rows))
