"""What every kernel is held to: cases, a float64 answer, tolerances."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import attention, cache
from kvjax.attention import Pairs, Queries
from kvjax.attention.reference import PLAIN
from kvjax.attention.stored import Stored
from kvjax.cache import codecs
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import make_spec
from kvjax.engine import steps
from testing.engine import decode

STATS = frozenset({"attn_sum", "attn_sq_sum", "last_attn"})
# The output's relative to the largest value; statistics are sums of weights in [0, 1].
TOLERANCE = {
    "float32": {"out": 3e-6, "stats": 1e-5},
    "bfloat16": {"out": 1e-2, "stats": 1e-5},
}


def draw(seed, heads, group, length, slots, depth, dtype="float32", rows=2, empty=0.3):
    """Random arrays: slots in random order, some of them empty and full of NaN.

    Rows differ in length; the first may have no live slot that its queries see.
    """
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(rows, heads, group, length, depth))
    k, v = rng.normal(size=(2, rows, heads, slots, depth))
    pos = np.argsort(rng.random((rows, heads, slots)), -1)
    pos[rng.random(pos.shape) < empty] = -1
    k[pos < 0], v[pos < 0] = np.nan, np.nan
    start = rng.integers(0, slots, rows)
    q_pos = start[:, None] + np.arange(length)[None]
    floats = [jnp.asarray(x, dtype) for x in (q, k, v)]
    ints = [
        jnp.asarray(x, jnp.int32)
        for x in (pos, q_pos, rng.integers(0, length + 1, rows))
    ]
    return *floats, *ints


def shapes(b, k, g, t, c, d, dtype=jnp.bfloat16, sharding=None):
    """What `attend` takes, without the numbers."""
    of = lambda shape, kind: jax.ShapeDtypeStruct(shape, kind, sharding=sharding)
    kv = of((b, k, c, d), dtype)
    pos, q_pos = of((b, k, c), jnp.int32), of((b, t), jnp.int32)
    return of((b, k, g, t, d), dtype), kv, kv, pos, q_pos, of((b,), jnp.int32)


def arguments(case):
    """A case's queries and pairs."""
    q, k, v, pos, q_pos, n = case
    return Queries(q, q_pos, n), Pairs(k, v, pos)


def finite(case):
    """The case with zeros in its empty slots, as the reference wants them."""
    q, k, v, *rest = case
    clean = lambda x: jnp.where(jnp.isnan(x), jnp.zeros((), x.dtype), x)
    return q, clean(k), clean(v), *rest


def by_hand(q, k, v, pos, q_pos, n, scoring=PLAIN):
    """Output and statistics in float64, one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    pos, q_pos, n = (np.asarray(x) for x in (pos, q_pos, n))
    out = np.zeros(q.shape)
    mean = np.zeros((*pos.shape[:2], q.shape[3], pos.shape[2]))  # [B, K, T, C]
    for b, h, g, t in np.ndindex(q.shape[:4]):
        seen = (pos[b, h] >= 0) & (pos[b, h] <= q_pos[b, t])
        if scoring.local_window:
            seen &= pos[b, h] > q_pos[b, t] - scoring.local_window
        if not seen.any():
            continue
        scores = k[b, h, seen] @ q[b, h, g, t] / np.sqrt(q.shape[-1])
        if cap := scoring.logits_soft_cap:
            scores = cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, h, g, t] = weights @ v[b, h, seen]
        mean[b, h, t, seen] += weights / q.shape[2]
    query = np.arange(q.shape[3])[None, None, :, None]
    count = n[:, None, None, None]
    real = np.where(query < count, mean, 0)
    return out, {
        "attn_sum": real.sum(2),
        "attn_sq_sum": (real**2).sum(2),
        "last_attn": np.where(query == count - 1, mean, 0).sum(2),
    }


def check(found, case, stats=STATS):
    """Holds what a kernel returned against the float64 answer."""
    out, expected = by_hand(*case)
    allowed = TOLERANCE[str(case[0].dtype)]
    whole = attention.normalize(found)
    np.testing.assert_allclose(
        whole, out, atol=allowed["out"] * max(np.abs(out).max(), 1)
    )
    for name, want in expected.items():
        if name in stats:
            np.testing.assert_allclose(
                getattr(found, name), want, atol=allowed["stats"]
            )
        else:
            assert getattr(found, name) is None


def stored(codec, k, v):
    """Keys and values as the codec stores them."""
    pairs = (k, codec.key), (v, codec.value)
    return tuple(Stored(t.encode(x), t, x.shape, x.dtype) for x, t in pairs)


def generated(
    model,
    policy,
    phases,
    implementation,
    budget=32,
    dtype="float32",
    codec=codecs.identity,
):
    """Tokens and kept positions of a ragged batch under one implementation."""
    spec = model.spec
    schedule = Schedule(phases, prefill_chunk=8, evict_size=8)
    how = {"implementation": implementation, "codec": codec}
    config = make_spec(spec, policy, budget, schedule, **how)
    lengths = jnp.array([50, 23, 40], jnp.int32)
    tokens = jax.random.randint(jax.random.key(3), (3, 56), 0, spec.vocab_size)
    room = config.prefill_capacity(spec, 56, 24)
    params = jax.tree.map(lambda x: x.astype(dtype), model.params)
    state = cache.init(spec, config, 3, room, jnp.dtype(dtype))
    state, logits = steps.prefill(
        params, state, tokens, lengths, spec=spec, config=config
    )
    if config.schedule.compacts:
        room = config.decode_capacity(spec, 56, 24)
        state = steps.compact(state, spec=spec, config=config, capacity=room)
    keys = jax.random.split(jax.random.key(0), 3)
    active = jnp.ones((3,), jnp.bool)
    state, out = decode(
        params, state, logits, active, keys, spec=spec, config=config, count=24
    )
    cache.raise_errors(state)
    return np.asarray(out), cache.kept_positions(state), np.asarray(logits)
