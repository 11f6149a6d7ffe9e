"""Tests of differentiable eviction: the oracle's logits, the gradient by the sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_model
from testing import oracle

from kvjax import policies
from kvjax.models import decoder
from kvjax.training import streaming
from kvjax.training.streaming import Reader

CHUNK, TOKENS, MEAN = 8, 96, 28
SIZES = ((16, 48), (24, 24))
ABOVE = 1.2  # times the mean, a head retrieves


def retrieval_heads(heads, now, keep):
    """One policy for the larger heads, another for the rest, chosen by their budget."""
    large, small = (
        rule(heads, now, keep)
        for rule in (oracle.key_diff(), oracle.average_attention())
    )
    several = zip(large, small, keep, strict=True)
    return [a if n + CHUNK > ABOVE * MEAN else b for a, b, n in several]


RULES = {
    "key_diff": (policies.key_diff(), oracle.key_diff()),
    "average": (policies.average_attention(), oracle.average_attention()),
    "retrieval": (policies.retrieval_heads(ABOVE), retrieval_heads),
    "pinned": (
        policies.protect(policies.key_diff(), 2, 4),
        oracle.protect(oracle.key_diff(), 2, 4),
    ),
}


def tokens(seed=0, count=TOKENS):
    return np.random.default_rng(seed).integers(0, 50, (1, count))


def read(model, ids, sizes, policy, kinds=SIZES):
    reader = Reader(policy, kinds, MEAN, CHUNK)
    ids, sizes = jnp.asarray(ids, jnp.int32), jnp.asarray(sizes, jnp.float32)
    hidden = streaming.read(model.params, model.spec, ids, sizes, reader)
    return decoder.logits(model.params, hidden[0], model.spec)


@pytest.mark.parametrize("name", RULES)
def test_as_the_oracle_reads(tiny, name):
    """Reads as Algorithm 1 does with a size for every head, chunk by chunk."""
    policy, rule = RULES[name]
    ids = tokens()
    found = read(tiny, ids, SIZES, policy)
    by_hand = oracle.Decoder(tiny.spec, tiny.params, rule, SIZES, CHUNK)
    chunks = ids[0].reshape(-1, CHUNK)
    expected = np.stack([by_hand.step(chunk) for chunk in chunks])
    np.testing.assert_allclose(found[CHUNK - 1 :: CHUNK], expected, atol=2e-4)
    assert max(map(len, by_hand.kept()[0])) == 48  # so pairs were evicted


def test_sizes_of_whole_texts_are_the_full_cache(tiny):
    ids = tokens(1)
    sizes = np.full((2, 2), TOKENS)
    found = read(tiny, ids, sizes, policies.key_diff())
    hidden = streaming.read_whole(tiny.params, tiny.spec, jnp.asarray(ids, jnp.int32))
    whole = decoder.logits(tiny.params, hidden[0], tiny.spec)
    np.testing.assert_allclose(found, whole, atol=2e-4)
    by_hand = oracle.Decoder(tiny.spec, tiny.params, None, None, None)
    expected = np.stack([by_hand.step(chunk) for chunk in ids[0].reshape(-1, CHUNK)])
    np.testing.assert_allclose(found[CHUNK - 1 :: CHUNK], expected, atol=2e-4)


def test_sizes_are_no_shapes(tiny):
    """One program reads with all sizes."""
    reader = Reader(policies.key_diff(), SIZES, MEAN, CHUNK)
    program = jax.jit(
        lambda ids, sizes: streaming.read(tiny.params, tiny.spec, ids, sizes, reader)
    )
    for size in (16.0, 40.0, 96.0):
        program(jnp.asarray(tokens(), jnp.int32), jnp.full((2, 2), size))
    assert program._cache_size() == 1


def test_order_of_staying():
    """Ranks live pairs by score, then evicted ones, the latest eviction first."""
    scores = jnp.asarray([[[0.3, 9.0, jnp.inf, 0.1, 9.0, 0.7, 0.0]]])
    live = jnp.asarray([[[True, False, True, True, False, True, False]]])
    evicted_at = jnp.asarray([[[streaming._LATER, 2, streaming._LATER, 5, 4, 5, -1]]])
    found = streaming._order(scores, live, evicted_at.astype(jnp.int32))
    assert found.ravel().tolist() == [2, 5, 0, 3, 4, 1, 6]


@pytest.mark.parametrize("head", often([(0, 0), (0, 1), (1, 1)], [(0, 1)], "e2e"))
def test_slopes_add_up_to_what_sizes_do(head):
    """The gradient summed from one size of a head to another is the loss's change.

    The loss is the squared distance to the full cache's hidden states, which is smooth
    over many chunks and queries. The gradient is first-order and smoothed over ranks,
    so the sum is only near the change: 1.0 to 1.45 times it here.
    """
    model = tiny_model(context_length=1024)
    ids = jnp.asarray(tokens(2, 512), jnp.int32)
    reader = Reader(policies.average_attention(), ((16, 17), (16, 17)), MEAN, CHUNK)
    every = jnp.full((2, 2), 512.0)
    given = model.params, model.spec, ids
    whole = streaming.read(*given, every, reader)

    @jax.jit
    @jax.value_and_grad
    def loss(sizes):
        return jnp.sum((streaming.read(*given, sizes, reader) - whole) ** 2)

    steps = np.arange(32, 193, 8)
    found = [loss(every.at[head].set(float(size))) for size in steps]
    values = np.array([float(value) for value, _ in found])
    slopes = np.array([float(slope[head]) for _, slope in found])
    assert values[0] > 2 * values[-1] > 0
    integral = np.trapezoid(slopes, steps)
    assert 0.8 < integral / (values[-1] - values[0]) < 1.6


@pytest.mark.e2e
def test_what_evicts_nothing_has_no_slope(tiny):
    reader = Reader(policies.key_diff(), SIZES, MEAN, CHUNK)
    given = tiny.params, tiny.spec, jnp.asarray(tokens(), jnp.int32)
    slope = jax.grad(lambda s: jnp.sum(streaming.read(*given, s, reader) ** 2))
    assert not np.any(slope(jnp.full((2, 2), 96.0)))
    assert np.all(slope(jnp.asarray(SIZES, jnp.float32)))
