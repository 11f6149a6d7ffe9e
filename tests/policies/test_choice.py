"""The choice that scores lead to: which slots go."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import policies
from kvjax.policies import base

jit = functools.partial(  # small arrays: compiling takes longer than running
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), ties=st.booleans(), slots=st.sampled_from([1, 9, 33])
)
def test_evictions_are_a_stable_sort(seed, ties, slots):
    """The lowest scores go, the older of equals first; empty slots never."""
    rng = np.random.default_rng(seed)
    score = rng.normal(size=(2, 3, slots)).astype(np.float32)
    if ties:
        score = np.round(score)
        score[rng.random(score.shape) < 0.3] = np.inf
    pos = np.argsort(rng.random((2, 3, slots)), -1)
    pos[rng.random(pos.shape) < 0.2] = -1
    least = (pos >= 0).sum(-1).min(-1)
    drop = rng.integers(0, least + 1)
    gone = policies.select_evictions(
        jnp.asarray(score, jnp.float32),
        jnp.asarray(pos, jnp.int32),
        jnp.asarray(drop, jnp.int32),
    )
    for b, h in np.ndindex(2, 3):
        live = np.flatnonzero(pos[b, h] >= 0)
        order = sorted(live, key=lambda c: (score[b, h, c], pos[b, h, c]))
        assert set(np.flatnonzero(gone[b, h])) == set(order[: drop[b]])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.sampled_from([1, 9, 33]))
def test_thresholds_by_bits_and_by_digits_agree(seed, slots):
    """What a GPU does, and what all others do; by sorting, where few are equal."""
    rng = np.random.default_rng(seed)
    order = rng.integers(0, 2**32, (2, 3, slots), dtype=np.uint32)
    order[rng.random(order.shape) < 0.2] = rng.choice([0, 1 << 31, 2**32 - 1])
    among = rng.random(order.shape) < 0.8
    k = rng.integers(0, slots + 1, (2, 3)).astype(np.int32)
    found = np.asarray(base._kth_by_digits(*map(jnp.asarray, (order, among, k))))
    by_bits = base._kth_by_bits(*map(jnp.asarray, (order, among, k)))
    np.testing.assert_array_equal(found, by_bits)
    for b, h in np.ndindex(2, 3):
        held = np.sort(order[b, h][among[b, h]])
        right = held[k[b, h]] if k[b, h] < len(held) else 2**32 - 1
        assert found[b, h] == right


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
def test_numbers_that_compilers_treat_apart(wrap):
    """NaN of either sign stays before all else, and -0 is 0, however it is run."""
    score = np.asarray([[[np.nan, 1e-42, -1e-42, 0.0, -0.0, np.nan, np.inf]]], "f4")
    score.view(np.uint32)[0, 0, 0] = 0xFFC00000  # as processors make it
    pos = jnp.arange(7)[None, None]
    choose = wrap(policies.select_evictions)
    gone = [choose(jnp.asarray(score), pos, jnp.asarray([n])) for n in range(8)]
    order = [set(np.flatnonzero(b & ~a)) for a, b in itertools.pairwise(gone)]
    assert order == [{2}, {3}, {4}, {1}, {6}, {0}, {5}]
