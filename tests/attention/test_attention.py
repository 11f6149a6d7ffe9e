"""Reference attention against float64 NumPy, and the merge of segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import attention
from kvjax.attention import AttentionSpec, attend, merge, normalize, reference
from kvjax.attention.reference import NO_STATS, PLAIN
from kvjax.types import ATTENTION_STATS, Scoring

SUMS = AttentionSpec(frozenset({"attn_sum"}))


def draw(seed, batch, heads, group, length, slots, depth):
    """Random arrays, slots in random order, some empty, rows of different lengths."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, heads, group, length, depth))
    k, v = rng.normal(size=(2, batch, heads, slots, depth))
    pos = np.argsort(rng.random((batch, heads, slots)), -1)
    pos[rng.random(pos.shape) < 0.3] = -1
    start = rng.integers(0, slots, batch)
    q_pos = start[:, None] + np.arange(length)[None]
    return q, k, v, pos, q_pos, rng.integers(0, length + 1, batch)


def by_hand(q, k, v, pos, q_pos, n):
    """Loops over everything, float64."""
    out, attn_sum = np.zeros(q.shape), np.zeros(pos.shape)
    for b, h, g, t in np.ndindex(q.shape[:4]):
        seen = (pos[b, h] >= 0) & (pos[b, h] <= q_pos[b, t])
        if not seen.any():
            continue
        scores = k[b, h, seen] @ q[b, h, g, t] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, h, g, t] = weights @ v[b, h, seen]
        if t < n[b]:
            attn_sum[b, h, seen] += weights / q.shape[2]
    return out, attn_sum


def arguments(q, k, v, pos, q_pos, n, dtype=jnp.float32):
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    pos, q_pos, n = (jnp.asarray(x, jnp.int32) for x in (pos, q_pos, n))
    return attention.Queries(q, q_pos, n), attention.Pairs(k, v, pos)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    group=st.sampled_from([1, 3, 8]),
    length=st.sampled_from([1, 4]),
    slots=st.sampled_from([1, 7, 16]),
)
def test_attention_and_its_sums(seed, group, length, slots):
    case = draw(seed, 2, 2, group, length, slots, 8)
    partial, seen = attend(*arguments(*case), SUMS)
    out, attn_sum = by_hand(*case)
    np.testing.assert_allclose(normalize(partial), out, atol=2e-6)
    np.testing.assert_allclose(seen.attn_sum, attn_sum, atol=1e-5)


@pytest.mark.parametrize(
    "scoring", [PLAIN, Scoring(logits_soft_cap=2.0, local_window=5)]
)
@pytest.mark.parametrize(
    "stats", [NO_STATS, *map(frozenset, (["attn_sum"], ATTENTION_STATS))]
)
@pytest.mark.parametrize("batch, many", [(1, 8), (2, 8), (5, 8), (5, 20)])
def test_tiles_are_the_reference(monkeypatch, batch, many, stats, scoring):
    """Tiles of 8 of 20 slots, rows two at a time; some rows hold nothing."""
    monkeypatch.setattr(reference, "TILE", 8)
    monkeypatch.setattr(reference, "MANY", many)
    monkeypatch.setattr(reference, "PIECE", 2 * 4 * (2 * 3 * 4 * 20))
    q, k, v, pos, q_pos, n = draw(3, batch, 2, 3, 4, 20, 8)
    pos[:, :, 14:] = -1  # the last slots are not in use
    pos[-1] = -1 if batch > 1 else pos[-1]
    case = arguments(q, k, v, pos, q_pos, n)
    wanted, seen = attend(*case, AttentionSpec(stats, "reference", scoring))
    found, also_seen = jax.jit(attend)(*case, AttentionSpec(stats, "tiles", scoring))
    np.testing.assert_allclose(normalize(found), normalize(wanted), atol=2e-6)
    np.testing.assert_allclose(found.max_logit, wanted.max_logit, atol=1e-6)
    if scoring == PLAIN:
        out, attn_sum = by_hand(q, k, v, pos, q_pos, n)
        np.testing.assert_allclose(normalize(found), out, atol=2e-6)
        if stats:
            np.testing.assert_allclose(also_seen.attn_sum, attn_sum, atol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6)
    jax.tree.map(close, also_seen, seen)


@pytest.mark.parametrize("stats", [NO_STATS, ATTENTION_STATS])
def test_tiles_of_short_floats(monkeypatch, stats):
    """As the reference has them, and never wide all at once."""
    monkeypatch.setattr(reference, "PIECE", 1 << 16)
    case = arguments(*draw(4, 16, 2, 3, 2, 1000, 64), jnp.bfloat16)
    tiled, spec = jax.jit(attend), AttentionSpec(stats, "tiles")
    wanted, seen = attend(*case, AttentionSpec(stats, "reference"))
    found, also_seen = tiled(*case, spec)
    np.testing.assert_allclose(normalize(found), normalize(wanted), atol=3e-3)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)
    jax.tree.map(close, also_seen, seen)
    if jax.default_backend() == "cpu":
        program = tiled.lower(*case, spec).compile().memory_analysis()
        assert program.temp_size_in_bytes < case[1].k.nbytes


def test_tiles_are_what_a_cpu_reads_prompts_with():
    pairs = attention.Pairs(jnp.zeros((1, 2, 20, 8)), None, None)
    for length, name in ((4, "tiles"), (1, "reference")):
        queries = attention.Queries(jnp.zeros((1, 2, 3, length, 8)), None, None)
        chosen = attention.backends.select_backend(queries, pairs, AttentionSpec())
        assert chosen.name == name


def test_sums_only_when_asked_for():
    assert attend(*arguments(*draw(0, 1, 1, 1, 1, 4, 8)))[1].attn_sum is None


@pytest.mark.parametrize("cut", [0, 1, 5, 12])
def test_segments_merge(cut):
    """Attention over two halves of the slots merges to attention over all."""
    queries, pairs = arguments(*draw(1, 2, 2, 3, 4, 12, 8))
    parts = [
        attend(queries, attention.Pairs(*(x[:, :, s] for x in pairs)))[0]
        for s in (slice(0, cut), slice(cut, None))
        if pairs.positions[:, :, s].size
    ]
    merged = parts[0] if len(parts) == 1 else merge(*parts)
    whole = attend(queries, pairs)[0]
    np.testing.assert_allclose(normalize(merged), normalize(whole), atol=1e-6)
    if len(parts) == 2:
        jax.tree.map(np.testing.assert_allclose, merge(*parts), merge(*parts[::-1]))


def test_bfloat16():
    low = arguments(*draw(2, 2, 2, 3, 4, 16, 8), jnp.bfloat16)
    widen = lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
    wide = jax.tree.map(widen, low)
    (a, seen_a), (b, seen_b) = attend(*low, SUMS), attend(*wide, SUMS)
    assert normalize(a).dtype == jnp.float32
    np.testing.assert_allclose(normalize(a), normalize(b), atol=2e-2)
    np.testing.assert_allclose(seen_a.attn_sum, seen_b.attn_sum, atol=1e-5)
