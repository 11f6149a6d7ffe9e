"""A text read with sizes as numbers: by the oracle, and what one more pair is worth."""

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
    """The larger heads' rule and the others', told apart by what they keep."""
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
    given = jnp.asarray(ids, jnp.int32), jnp.asarray(sizes, jnp.float32)
    hidden = streaming.read(model.params, model.spec, *given, reader)
    return decoder.logits(model.params, hidden[0], model.spec)


@pytest.mark.parametrize("name", RULES)
def test_as_the_oracle_reads(tiny, name):
    """Algorithm 1 with a size for every head, chunk after chunk."""
    policy, rule = RULES[name]
    ids = tokens()
    found = read(tiny, ids, SIZES, policy)
    by_hand = oracle.Decoder(tiny.spec, tiny.params, rule, SIZES, CHUNK)
    chunks = ids[0].reshape(-1, CHUNK)
    expected = np.stack([by_hand.step(chunk) for chunk in chunks])
    np.testing.assert_allclose(found[CHUNK - 1 :: CHUNK], expected, atol=2e-4)
    assert max(map(len, by_hand.kept()[0])) == 48  # and so pairs have gone


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
    """One program for all of them."""
    reader = Reader(policies.key_diff(), SIZES, MEAN, CHUNK)
    program = jax.jit(
        lambda ids, sizes: streaming.read(tiny.params, tiny.spec, ids, sizes, reader)
    )
    for size in (16.0, 40.0, 96.0):
        program(jnp.asarray(tokens(), jnp.int32), jnp.full((2, 2), size))
    assert program._cache_size() == 1


def test_order_of_staying():
    """Those that were there by score, then what has gone, the last first."""
    scores = jnp.asarray([[[0.3, 9.0, jnp.inf, 0.1, 9.0, 0.7, 0.0]]])
    live = jnp.asarray([[[True, False, True, True, False, True, False]]])
    gone = jnp.asarray([[[streaming._LATER, 2, streaming._LATER, 5, 4, 5, -1]]])
    found = streaming._order(scores, live, gone.astype(jnp.int32))
    assert found.ravel().tolist() == [2, 5, 0, 3, 4, 1, 6]


@pytest.mark.parametrize("head", often([(0, 0), (0, 1), (1, 1)], [(0, 1)], "e2e"))
def test_slopes_add_up_to_what_sizes_do(head):
    """Between two sizes of a head, the mean slope is the loss's change per pair.

    A loss that is smooth over many chunks and queries: the squared distance to the full
    cache's hidden states. Slopes are of the first order, and of pairs about the cut, so
    their sum is near, not equal: 1.0 to 1.45 times the change here.
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
    told = np.trapezoid(slopes, steps)
    assert 0.8 < told / (values[-1] - values[0]) < 1.6


@pytest.mark.e2e
def test_what_evicts_nothing_has_no_slope(tiny):
    reader = Reader(policies.key_diff(), SIZES, MEAN, CHUNK)
    given = tiny.params, tiny.spec, jnp.asarray(tokens(), jnp.int32)
    slope = jax.grad(lambda s: jnp.sum(streaming.read(*given, s, reader) ** 2))
    assert not np.any(slope(jnp.full((2, 2), 96.0)))
    assert np.all(slope(jnp.asarray(SIZES, jnp.float32)))
