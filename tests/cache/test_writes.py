"""Writes of slots and rows store every dtype bit for bit."""

import functools
import re

import jax
import ml_dtypes
import numpy as np
import pytest

from kvjax.cache.layouts.base import put
from kvjax.parallel import host

RNG = np.random.default_rng(0)
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "bool")
SHORT = ("bfloat16", "float16", "float8_e4m3fn")
ROWS, HEADS, SLOTS, DEPTH = 3, 2, 40, 16


def _numbers(shape, dtype):
    return RNG.normal(0, 30, shape).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("depth", [(), (DEPTH,)])
def test_what_is_put_is_there_bit_for_bit_and_nothing_else_changes(dtype, count, depth):
    leaf = _numbers((ROWS, HEADS, SLOTS, *depth), dtype)
    new = _numbers((ROWS, HEADS, count, *depth), dtype)
    if dtype in SHORT:
        new[0], leaf[1] = np.nan, np.nan  # as visible as it was
    places = [RNG.permutation(SLOTS + 9)[:count] for _ in range(ROWS * HEADS)]
    slots = np.array(places, np.int32).reshape(ROWS, HEADS, count)
    expected = leaf.copy()
    for row, head, i in np.ndindex(slots.shape):
        if slots[row, head, i] < SLOTS:
            expected[row, head, slots[row, head, i]] = new[row, head, i]
    found = np.asarray(jax.jit(put)(leaf, slots, new))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("count", [1, 5])
def test_no_write_widens_what_is_stored(dtype, count):
    shape = ROWS, HEADS, SLOTS, DEPTH
    asked = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    slots = jax.ShapeDtypeStruct((ROWS, HEADS, count), "int32")
    program = jax.jit(put, donate_argnums=0).lower(
        asked(shape), slots, asked((ROWS, HEADS, count, DEPTH))
    )
    text = program.compile().as_text()
    whole = re.escape(",".join(map(str, shape)))
    entry = text[text.index("ENTRY") :]  # within a fusion nothing is stored
    assert not re.search(rf"= f32\[{whole}\]", entry)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_inserted_bit_for_bit_and_those_beyond_dropped(dtype):
    whole, part = (_numbers((rows, HEADS, SLOTS), dtype) for rows in (ROWS, 4))
    rows, expected = np.array([2, ROWS, 0, 9], np.int32), whole.copy()
    expected[[2, 0]] = part[[0, 2]]
    found = np.asarray(jax.jit(host.insert)(whole, part, rows))
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", SHORT)
def test_no_insert_widens_what_is_stored(dtype):
    asked = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    shape, rows = (ROWS, HEADS, SLOTS), jax.ShapeDtypeStruct((2,), "int32")
    program = jax.jit(host.insert, donate_argnums=0).lower(
        asked(shape), asked((2, HEADS, SLOTS)), rows
    )
    text = program.compile().as_text()
    assert not re.search(rf"= f32\[{ROWS},{HEADS},{SLOTS}\]", text)
