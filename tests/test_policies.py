"""The rules with arrays alone, and the choice that scores lead to."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import policies
from kvjax.types import Observation, Stats, View


def view(pos, keep, keys=None):
    pos = jnp.asarray(pos, jnp.int32)
    now = jnp.max(pos, axis=(1, 2))
    return View(pos, now, jnp.asarray(keep, jnp.int32), lambda: keys, lambda: keys)


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


def test_a_rule_in_somebody_elses_code():
    """No model, cache or layout of ours: arrays in, arrays out, under jit."""
    policy = policies.average_attention()
    spec = types.SimpleNamespace(num_kv_heads=2, group=1, head_dim=4)
    weights = jax.nn.softmax(jax.random.normal(jax.random.key(0), (1, 2, 6, 6)))
    causal = weights * jnp.tril(jnp.ones((6, 6)))[None, None]

    @jax.jit
    def choose(weights):
        pos = jnp.broadcast_to(jnp.arange(6), (1, 2, 6))
        seen = view(pos, [[4, 4]])
        stats = policy.init(spec, 1, 6)
        stats = policy.observe(stats, seen, Observation(attn_sum=weights.sum(2)))
        return policies.select_evictions(
            policy.score(stats, seen), pos, jnp.asarray([2])
        )

    average = np.asarray(causal.sum(2)) / (6 - np.arange(6))
    expected = np.zeros((1, 2, 6), bool)
    for h in range(2):
        expected[0, h, np.argsort(average[0, h])[:2]] = True
    np.testing.assert_array_equal(choose(causal), expected)


def test_h2o_splits_what_is_kept():
    pos = np.arange(10)[None, None]
    mass = jnp.asarray(np.arange(10, 0, -1)[None, None], jnp.float32)
    gone = policies.select_evictions(
        policies.h2o(recent=0.5).score(Stats(mass), view(pos, [[6]])),
        jnp.asarray(pos),
        jnp.asarray([4]),
    )
    assert np.flatnonzero(~gone[0, 0]).tolist() == [0, 1, 2, 7, 8, 9]


def test_key_diff_drops_the_alike():
    keys = jnp.asarray([[[[1, 0.1], [1, 0], [1, -0.1], [0, 1]]]], jnp.float32)
    pos = jnp.arange(4)[None, None]
    score = policies.key_diff().score((), view(pos, [2], keys))
    assert int(jnp.argmax(score)) == 3
    empty = view(jnp.asarray([[[0, -1, 2, 3]]]), [2], keys.at[:, :, 1].set(1e9))
    assert np.isfinite(policies.key_diff().score((), empty)).all()


def test_random_is_a_uniform_sample():
    """Half of 4,000 positions stay, evenly spread, differing by head and seed."""
    pos = np.broadcast_to(np.arange(4000), (1, 2, 4000))
    kept = [
        np.argsort(policies.random(seed).score((), view(pos, [2000])))[..., 2000:]
        for seed in (0, 1)
    ]
    for sample in (kept[0][0, 0], kept[0][0, 1], kept[1][0, 0]):
        assert np.all(np.abs(np.histogram(sample, 8, (0, 4000))[0] - 250) < 60)
    overlap = len(np.intersect1d(kept[0][0, 0], kept[0][0, 1]))
    assert 900 < overlap < 1100
    assert 900 < len(np.intersect1d(kept[0][0, 0], kept[1][0, 0])) < 1100


def test_streaming_keeps_sinks_and_newest():
    pos = np.arange(12)[None, None]
    score = policies.streaming(sinks=2).score((), view(pos, [5]))
    gone = policies.select_evictions(score, jnp.asarray(pos), jnp.asarray([7]))
    assert np.flatnonzero(~gone[0, 0]).tolist() == [0, 1, 9, 10, 11]


def test_factories_give_one_policy():
    """So that jit, which takes them static, compiles once."""
    assert policies.h2o() is policies.h2o()
    assert policies.protect(policies.h2o(), 1, 2) is policies.protect(
        policies.h2o(), 1, 2
    )
    assert [policies.make(name).name for name in policies.names()] == list(
        policies.names()
    )
    with pytest.raises(policies.UserError):
        policies.make("")
