"""Masked attention in `jax.numpy`, the definition that every backend must match.

It runs everywhere, whole (`attend`) or in pieces that fit a CPU's cache
(`attend_in_tiles`). `merge` joins segments of the keys; `normalize` divides.
"""

import functools
import math

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.inputs import AttentionSpec, Pairs, Queries
from kvjax.attention.stored import Stored, decoded
from kvjax.pallas.common import LOWEST, NEVER
from kvjax.types import EMPTY, Observation, Partial, PyTree, Scoring

NO_STATS: frozenset[str] = frozenset()
PLAIN = Scoring()  # softmax without a soft cap or a window
TILE = 128  # slots per piece in `_over_slots`
MANY = 4 * TILE  # `_over_slots` runs above this number of slots
PIECE = 3 << 20  # bytes of logits and decoded pairs per piece in `_over_rows`


def attend(
    queries: Queries, pairs: Pairs, spec: AttentionSpec
) -> tuple[Partial, Observation]:
    """Attends to all slots at once; see `kvjax.attention.attend`."""
    v = decoded(pairs.v)
    p, sums, seen = weights(queries, pairs, spec)
    out = jnp.einsum(
        "bkgtc,bkcd->bkgtd", p.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return sums._replace(out=out), seen


def weights(
    queries: Queries, pairs: Pairs, spec: AttentionSpec
) -> tuple[Float[Array, "B K G T C"], Partial, Observation]:
    """Computes the unnormalised weights; see `kvjax.attention.weights`."""
    logits = _logits(queries, pairs, spec)
    max_logit = jnp.max(logits, axis=-1)
    p = jnp.exp(logits - jnp.maximum(max_logit, LOWEST)[..., None])
    denominator = jnp.sum(p, axis=-1)
    out = jnp.zeros(queries.q.shape, jnp.float32)
    seen = _observed(p, denominator, queries, spec.stats)
    return p, Partial(out, max_logit, denominator), seen


def attend_in_tiles(
    queries: Queries, pairs: Pairs, spec: AttentionSpec
) -> tuple[Partial, Observation]:
    """Attends in pieces whose logits stay in a processor's cache.

    Without statistics, a piece is `TILE` of more than `MANY` slots, up to the last slot
    in use. Otherwise a piece is all slots of some rows, because statistics need the
    whole softmax. Stored pairs are decoded piece by piece too.
    """
    cut = _over_rows if spec.stats or pairs.k.shape[2] <= MANY else _over_slots
    partial, found = cut(queries, pairs, spec)
    return partial, Observation(
        num_tokens=queries.n, positions=queries.positions, **found
    )


def attention_stats(
    queries: Queries, pairs: Pairs, whole: Partial, spec: AttentionSpec
) -> Observation:
    """Computes only the statistics; see `kvjax.attention.attention_stats`."""
    logits = _logits(queries, pairs, spec)
    p = jnp.exp(logits - jnp.maximum(whole.max_logit, LOWEST)[..., None])
    return _observed(p, whole.denominator, queries, spec.stats)


def merge(a: Partial, b: Partial) -> Partial:
    """Joins the attention over two disjoint segments of keys; associative."""
    max_logit = jnp.maximum(a.max_logit, b.max_logit)
    base = jnp.where(jnp.isfinite(max_logit), max_logit, 0.0)
    wa, wb = jnp.exp(a.max_logit - base), jnp.exp(b.max_logit - base)
    return Partial(
        out=a.out * wa[..., None] + b.out * wb[..., None],
        max_logit=max_logit,
        denominator=a.denominator * wa + b.denominator * wb,
    )


def normalize(partial: Partial) -> Float[Array, "B K G T D"]:
    """Returns the float32 output; 0 if a query attends to no key, NaN stays NaN."""
    seen = partial.denominator != 0
    return jnp.where(
        seen[..., None],
        partial.out / jnp.where(seen, partial.denominator, 1.0)[..., None],
        0.0,
    )


def visible(
    pos: Int[Array, "B K C"], q_pos: Int[Array, "B T"], local_window: int = 0
) -> Bool[Array, "B K 1 T C"]:
    """Returns the attention mask: live slots, causal, within the window if any."""
    seen_from = jnp.where(pos < 0, NEVER, pos)[:, :, None, None]
    now = q_pos[:, None, None, :, None]
    seen = seen_from <= now
    return seen & (seen_from > now - local_window) if local_window else seen


def _over_rows(queries: Queries, pairs: Pairs, spec: AttentionSpec):
    """Attends to a piece of the rows at a time; returns statistics by name."""

    def attend_rows(queries, pairs):
        partial, seen = attend(queries, pairs, spec)
        return partial, {x: getattr(seen, x) for x in spec.stats}

    batch, *others, depth = queries.q.shape
    slots = pairs.k.shape[2]
    piece = 4 * math.prod(others) * slots
    coded = sum(isinstance(tensor, Stored) for tensor in (pairs.k, pairs.v))
    piece += 4 * coded * others[0] * slots * depth
    rows = max(1, PIECE // piece)
    passes = -(-batch // rows)
    if passes == 1:
        return attend_rows(queries, pairs)
    rows = -(-batch // passes)

    def a_pass(i, found):
        start = jnp.minimum(i * rows, batch - rows)  # the last one may repeat some rows
        part = attend_rows(*_cut((queries, pairs), start, rows, axis=0))
        put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new, start, axis=0)
        return jax.tree.map(put, found, part)

    shapes = jax.eval_shape(attend_rows, queries, pairs)
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.fori_loop(0, passes, a_pass, empty)


def _over_slots(queries: Queries, pairs: Pairs, spec: AttentionSpec):
    """Attends to `TILE` slots at a time, up to the last in use; no statistics."""
    shape, slots = queries.q.shape, pairs.k.shape[2]
    in_use = jnp.any(pairs.positions != EMPTY, axis=(0, 1))
    end = jnp.max(jnp.where(in_use, jnp.arange(1, slots + 1), 0))

    def a_tile(i, done):
        start = jnp.minimum(i * TILE, slots - TILE)
        fresh = start + jnp.arange(TILE) >= i * TILE  # the last tile may repeat some
        some = _cut(pairs, start, TILE, axis=2)
        some = some._replace(positions=jnp.where(fresh, some.positions, EMPTY))
        return merge(done, attend(queries, some, spec)[0])

    nothing = Partial(
        out=jnp.zeros(shape, jnp.float32),
        max_logit=jnp.full(shape[:4], -jnp.inf),
        denominator=jnp.zeros(shape[:4]),
    )
    return lax.fori_loop(0, -(-end // TILE), a_tile, nothing), {}


def _cut(arrays: PyTree, start: Array, size: int, axis: int) -> PyTree:
    """Slices `size` entries of every array from `start` on, inside a loop.

    XLA's CPU backend widens bfloat16 and float16 to slice them. Without the barrier it
    hoists that out of the loop, and widens the whole layer.
    """
    arrays, start = lax.optimization_barrier((arrays, start))
    return jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, start, size, axis), arrays
    )


def _observed(
    p: Float[Array, "B K G T C"],
    denominator: Float[Array, "B K G T"],
    queries: Queries,
    stats: frozenset[str],
) -> Observation:
    """Computes the requested statistics from unnormalised weights and their sums."""
    n = queries.n
    seen = Observation(num_tokens=n, positions=queries.positions)
    if not stats:
        return seen
    group, length = p.shape[2:4]
    real = jnp.arange(length)[None, :] < n[:, None]
    counts = real[:, None, None] & (denominator > 0)
    share = jnp.where(counts, 1.0 / denominator, 0.0)
    if "attn_weights" in stats:
        seen = seen._replace(attn_weights=p * share[..., None])
    share = share / group
    if "attn_sum" in stats or length == 1:
        attn_sum = jnp.matmul(  # shares times all weights sums them in one pass
            rearrange(share, "b k g t -> b k 1 (g t)"),
            rearrange(p, "b k g t c -> b k (g t) c"),
            precision=lax.Precision.HIGHEST,
        )[:, :, 0]
        seen = seen._replace(attn_sum=attn_sum)
        if length == 1:  # one query: its weights are all there is to sum
            return seen._replace(attn_sq_sum=attn_sum * attn_sum, last_attn=attn_sum)
    if "attn_sq_sum" in stats:
        parts = (p[:, :, g] * share[:, :, g, :, None] for g in range(group))
        mean = functools.reduce(jnp.add, parts)  # [B, K, T, C]; a sum is a slow loop
        seen = seen._replace(attn_sq_sum=jnp.sum(mean * mean, axis=2))
    if "last_attn" in stats:
        newest = jnp.maximum(n - 1, 0)[:, None, None, None]  # [B, 1, 1, 1]
        row = jnp.take_along_axis(p, newest[..., None], axis=3)
        part = jnp.take_along_axis(share, newest, axis=3)[..., None]
        seen = seen._replace(last_attn=jnp.sum(row * part, axis=(2, 3)))
    return seen


def _logits(
    queries: Queries, pairs: Pairs, spec: AttentionSpec
) -> Float[Array, "B K G T C"]:
    k, now = decoded(pairs.k), queries.positions
    return masked_logits(queries.q, k, pairs.positions, now, spec.scoring)


def masked_logits(q, k, pos, q_pos, scoring: Scoring) -> Float[Array, "B K G T C"]:
    """Returns the scaled logits, -inf at slots that a query may not attend to."""
    logits = _products(q, k) if q.shape[3] == 1 else _textbook_products(q, k)
    logits = logits * q.shape[4] ** -0.5
    if cap := scoring.logits_soft_cap:
        logits = cap * jnp.tanh(logits / cap)
    return jnp.where(visible(pos, q_pos, scoring.local_window), logits, -jnp.inf)


def _products(
    q: Float[Array, "B K G 1 D"], k: Float[Array, "B K C D"]
) -> Float[Array, "B K G 1 C"]:
    """Computes q . k for one query per row, in the fastest form for the platform."""
    return lax.platform_dependent(
        q, k, cpu=_keys_first_products, default=_textbook_products
    )


def _textbook_products(q, k):
    return jnp.einsum("bkgtd,bkcd->bkgtc", q, k, preferred_element_type=jnp.float32)


def _keys_first_products(q, k):
    """Computes q . k with the keys as first operand, which a CPU reads 1.7x faster.

    The barrier keeps the compiler from swapping the operands back.
    """
    products = jnp.einsum(
        "hcd,hnd->hcn",
        rearrange(k, "b k c d -> (b k) c d"),
        rearrange(q, "b k g t d -> (b k) (g t) d"),
        preferred_element_type=jnp.float32,
    )
    products = lax.optimization_barrier(products)
    heads, group = q.shape[1:3]
    return rearrange(products, "(b k) c (g t) -> b k g t c", k=heads, g=group)
