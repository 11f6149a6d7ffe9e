"""Masked attention over slots, with the importance statistics that policies need.

The reference is plain `jax.numpy`: right on every backend, and the meaning that every
kernel has to agree with. `kvjax.attention.backends` says which of them runs.
"""

import functools
import math

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.attention.backends import (
    LIBRARY,
    PLAIN,
    PORTABLE,
    WRITERS,
    kernel,
    select_backend,
)
from kvjax.pallas.common import LOWEST, NEVER
from kvjax.types import ATTENTION_STATS, EMPTY, Observation, Partial, Scoring

NOTHING: frozenset[str] = frozenset()
TILE = 128  # slots attended to at a time by `tiles`
PIECE = 5 << 20  # bytes of scores at a time where it hands over statistics


def attend(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K C D"],
    v: Float[Array, "B K C D"],
    pos: Int[Array, "B K C"],
    q_pos: Int[Array, "B T"],
    n: Int[Array, "B"],
    needs: frozenset[str] = NOTHING,
    implementation: str | None = None,
    scoring: Scoring = PLAIN,
) -> tuple[Partial, Observation]:
    """Softmax attention of T queries over C slots, scores scaled by D ** -0.5.

    A query sees the live slots whose position is not after its own. Empty slots get no
    weight; they must hold finite numbers, as a fresh or evicted slot does.

    Args:
      q: queries.
      k: keys, one per slot.
      v: values, one per slot.
      pos: position of each slot's pair, -1 for an empty slot.
      q_pos: position of each query.
      n: how many of a row's T queries are real; the others are padding at the end.
      needs: statistics of the weights to return, see `kvjax.types.Observation`; what
        attention does not know is left to the caller.
      implementation: see `kvjax.attention.backends`; None is the best that runs.
      scoring: a cap on the scores, a window on what a query sees.

    Returns:
      The unnormalised output, and the statistics asked for.

    Raises:
      UserError: a named implementation that is unknown, or cannot run here or with
        these arguments; the message says why.
    """
    needs = needs & ATTENTION_STATS
    name = select_backend(q, k, needs, implementation, scoring)
    if name == "reference":
        return _reference(q, k, v, pos, q_pos, n, needs, scoring)
    if name == "tiles":
        found = _tiled(q, k, v, pos, q_pos, n, needs, scoring)
        return found[0], Observation(num_tokens=n, positions=q_pos, **found[1])
    if name in LIBRARY:
        partial = _library(q, k, v, pos, q_pos, name)
        return partial, Observation(num_tokens=n, positions=q_pos)
    module, interpret = kernel(name)
    how = {"stats": needs, "interpret": interpret, **_asked(scoring)}
    found = module.attend(q, k, v, pos, q_pos, n, **how)
    return _as_pair(found, n, q_pos)


def write_attend(
    q: Float[Array, "B K G 1 D"],
    new_k: Float[Array, "B K D"],
    new_v: Float[Array, "B K D"],
    slot: Int[Array, "B K"],
    k: Float[Array, "B K C D"],
    v: Float[Array, "B K C D"],
    pos: Int[Array, "B K C"],
    q_pos: Int[Array, "B 1"],
    n: Int[Array, "B"],
    needs: frozenset[str],
    implementation: str | None,
    scoring: Scoring,
) -> tuple[Partial, Observation, Array, Array]:
    """`attend` for one query per row, with the write of its own pair fused in.

    Only where `fuses_write` says so. `pos` has the new pairs' positions already; a slot
    of C or more is not written. Returns K and V as well, in the same buffers.
    """
    needs = needs & ATTENTION_STATS
    module, interpret = kernel(select_backend(q, k, needs, implementation, scoring))
    how = {"stats": needs, "interpret": interpret, **_asked(scoring)}
    found, k, v, *_ = module.write_attend(
        q, new_k, new_v, slot, k, v, pos, q_pos, n, **how
    )
    return *_as_pair(found, n, q_pos), k, v


def fuses_write(
    q: Array,
    k: Array,
    needs: frozenset[str],
    implementation: str | None,
    scoring: Scoring,
) -> bool:
    """Whether `write_attend` should take these: elsewhere the layout writes first."""
    name = select_backend(q, k, needs & ATTENTION_STATS, implementation, scoring)
    if q.shape[3] > 1 or name not in WRITERS:
        return False
    return k.shape[2] % kernel(name)[0].write_grain(k.shape[3]) == 0


def attend_segments(
    q: Float[Array, "B K G T D"],
    segments: list[tuple[Array, Array, Array]],
    q_pos: Int[Array, "B T"],
    n: Int[Array, "B"],
    needs: frozenset[str] = NOTHING,
    implementation: str | None = None,
    scoring: Scoring = PLAIN,
) -> tuple[Partial, list[Observation]]:
    """`attend` over slots that lie in several places: splits, a prefix, a window.

    The statistics of every segment are those of one softmax over all of them: its
    log-sum-exp is merged first, and the weights are taken with it. (Weights that are
    summed over queries cannot be put right afterwards.)

    Args:
      q: queries.
      segments: (k, v, pos) of each, disjoint; their numbers of slots may differ.
      q_pos: position of each query.
      n: real queries per row.
      needs: statistics to return.
      implementation: see `attend`.
      scoring: likewise.

    Returns:
      The merged attention, and one observation per segment.
    """
    needs = needs & ATTENTION_STATS
    parts = [
        attend(q, k, v, pos, q_pos, n, NOTHING, implementation, scoring)[0]
        for k, v, pos in segments
    ]
    whole = functools.reduce(merge, parts)
    seen = [
        attention_stats(q, k, pos, q_pos, n, whole, needs, implementation, scoring)
        for k, _, pos in segments
    ]
    return whole, seen


def attention_stats(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K C D"],
    pos: Int[Array, "B K C"],
    q_pos: Int[Array, "B T"],
    n: Int[Array, "B"],
    whole: Partial,
    needs: frozenset[str],
    implementation: str | None = None,
    scoring: Scoring = PLAIN,
) -> Observation:
    """The statistics alone, of weights under a softmax whose `m` and `l` are known.

    Args:
      q: queries.
      k: keys of some slots.
      pos: their positions.
      q_pos: position of each query.
      n: real queries per row.
      whole: the softmax over all slots; its `o` is not used.
      needs: statistics to return.
      implementation: see `attend`.
      scoring: likewise.
    """
    needs = needs & ATTENTION_STATS
    if not needs:
        return Observation(num_tokens=n, positions=q_pos)
    name = select_backend(q, k, needs, implementation, scoring)
    if name in PORTABLE:
        scores = _masked_scores(q, k, pos, q_pos, scoring)
        p = jnp.exp(scores - jnp.maximum(whole.max_logit, LOWEST)[..., None])
        return _observed(p, whole.denominator, n, q_pos, needs)
    module, interpret = kernel(name)
    how = {"stats": needs, "interpret": interpret, **_asked(scoring)}
    found = module.attention_stats(
        q, k, pos, q_pos, n, whole.max_logit, whole.denominator, **how
    )
    return Observation(num_tokens=n, positions=q_pos, **found)


def _reference(q, k, v, pos, q_pos, n, needs, scoring) -> tuple[Partial, Observation]:
    scores = _masked_scores(q, k, pos, q_pos, scoring)
    m = jnp.max(scores, axis=-1)
    p = jnp.exp(scores - jnp.maximum(m, LOWEST)[..., None])
    l = jnp.sum(p, axis=-1)  # noqa: E741
    o = jnp.einsum(
        "bkgtc,bkcd->bkgtd", p.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return Partial(o, m, l), _observed(p, l, n, q_pos, needs)


def _tiled(q, k, v, pos, q_pos, n, needs, scoring) -> tuple[Partial, dict[str, Array]]:
    """The reference in pieces whose scores stay in a processor's cache.

    Without statistics, some slots at a time, and only as far as slots are in use; with
    them, all slots of some rows, as their softmax has to be known.
    """
    given = q, k, v, pos, q_pos, n
    if not needs:
        return _over_slots(*given, scoring), {}

    def some(*given):
        partial, seen = _reference(*given, needs, scoring)
        return partial, {x: getattr(seen, x) for x in ATTENTION_STATS if x in needs}

    batch, *others = q.shape[:4]
    rows = max(1, PIECE // (4 * math.prod(others) * k.shape[2]))
    passes = -(-batch // rows)
    if passes == 1:
        return some(*given)
    rows = -(-batch // passes)

    def a_pass(i, found):
        start = jnp.minimum(i * rows, batch - rows)  # the last one may repeat some rows
        part = some(*(lax.dynamic_slice_in_dim(x, start, rows) for x in given))
        put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new, start, axis=0)
        return jax.tree.map(put, found, part)

    shapes = jax.eval_shape(some, *given)
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.fori_loop(0, passes, a_pass, empty)


def _over_slots(q, k, v, pos, q_pos, n, scoring) -> Partial:
    """`TILE` slots after the others, up to the last one in use."""
    slots = k.shape[2]
    if slots <= TILE:
        return _reference(q, k, v, pos, q_pos, n, NOTHING, scoring)[0]
    in_use = jnp.any(pos != EMPTY, axis=(0, 1))
    end = jnp.max(jnp.where(in_use, jnp.arange(1, slots + 1), 0))

    def a_tile(i, done):
        start = jnp.minimum(i * TILE, slots - TILE)
        cut = lambda x: lax.dynamic_slice_in_dim(x, start, TILE, axis=2)
        fresh = start + jnp.arange(TILE) >= i * TILE  # the last tile may repeat some
        some = cut(k), cut(v), jnp.where(fresh, cut(pos), EMPTY)
        return merge(done, _reference(q, *some, q_pos, n, NOTHING, scoring)[0])

    nothing = Partial(
        out=jnp.zeros(q.shape, jnp.float32),
        max_logit=jnp.full(q.shape[:4], -jnp.inf),
        denominator=jnp.zeros(q.shape[:4]),
    )
    return lax.fori_loop(0, -(-end // TILE), a_tile, nothing)


def _masked_scores(q, k, pos, q_pos, scoring) -> Float[Array, "B K G T C"]:
    """Scaled products, -inf where a query sees no pair."""
    scores = _products(q, k) if q.shape[3] == 1 else _textbook_products(q, k)
    scores = scores * q.shape[4] ** -0.5
    if cap := scoring.logits_soft_cap:
        scores = cap * jnp.tanh(scores / cap)
    return jnp.where(_visible(pos, q_pos, scoring.local_window), scores, -jnp.inf)


def _visible(pos, q_pos, reach: int = 0) -> Array:
    """bool[B, K, 1, T, C]."""
    seen_from = jnp.where(pos < 0, NEVER, pos)[:, :, None, None]
    now = q_pos[:, None, None, :, None]
    visible = seen_from <= now
    return visible & (seen_from > now - reach) if reach else visible


def _library(q, k, v, pos, q_pos, name: str) -> Partial:
    """JAX's own attention; its normalised output is a partial one of weight 1."""
    flat = lambda x: rearrange(x, "b k g t d -> b t (k g) d")
    shape = (*q.shape[:4], k.shape[2])
    seen = jnp.broadcast_to(_visible(pos, q_pos), shape)
    with jax.numpy_dtype_promotion("standard"):  # it mixes dtypes inside
        o, lse = jax.nn.dot_product_attention(
            flat(q),
            rearrange(k, "b k c d -> b c k d"),
            rearrange(v, "b k c d -> b c k d"),
            mask=rearrange(seen, "b k g t c -> b (k g) t c"),
            implementation=name,
            return_residual=True,
        )
    any_seen = jnp.any(seen, axis=-1)
    o = rearrange(o, "b t (k g) d -> b k g t d", k=q.shape[1]).astype(jnp.float32)
    lse = rearrange(lse, "b t (k g) -> b k g t", k=q.shape[1]).astype(jnp.float32)
    return Partial(
        out=jnp.where(any_seen[..., None], o, 0.0),
        max_logit=jnp.where(any_seen, lse, -jnp.inf),
        denominator=any_seen.astype(jnp.float32),
    )


def _asked(scoring: Scoring) -> dict[str, float]:
    """What a kernel is asked for beyond plain softmax; not all know how."""
    return scoring._asdict() if scoring != PLAIN else {}


def _as_pair(found, n, q_pos) -> tuple[Partial, Observation]:
    """What a kernel returns, in the words of the package."""
    seen = {
        name: getattr(found, name) for name in ("attn_sum", "attn_sq_sum", "last_attn")
    }
    return Partial(found.out, found.max_logit, found.denominator), Observation(
        num_tokens=n, positions=q_pos, **seen
    )


def _observed(
    p: Float[Array, "B K G T C"],
    l: Float[Array, "B K G T"],  # noqa: E741
    n: Int[Array, "B"],
    q_pos: Int[Array, "B T"],
    needs: frozenset[str],
) -> Observation:
    """The statistics asked for, from unnormalised weights and their sums."""
    seen = Observation(num_tokens=n, positions=q_pos)
    if not needs:
        return seen
    group, length = p.shape[2:4]
    real = jnp.arange(length)[None, :] < n[:, None]
    share = jnp.where(real[:, None, None] & (l > 0), 1.0 / l, 0.0)
    if "attn_weights" in needs:
        seen = seen._replace(attn_weights=p * share[..., None])
    share = share / group
    if "attn_sum" in needs or length == 1:
        mass = jnp.matmul(  # a row of shares times all weights sums them in one pass
            rearrange(share, "b k g t -> b k 1 (g t)"),
            rearrange(p, "b k g t c -> b k (g t) c"),
            precision=jax.lax.Precision.HIGHEST,
        )[:, :, 0]
        seen = seen._replace(attn_sum=mass)
        if length == 1:  # one query: its weights are all there is to sum
            return seen._replace(attn_sq_sum=mass * mass, last_attn=mass)
    if "attn_sq_sum" in needs:
        mean = jnp.sum(p * share[..., None], axis=2)  # [B, K, T, C]
        seen = seen._replace(attn_sq_sum=jnp.sum(mean * mean, axis=2))
    if "last_attn" in needs:
        newest = jnp.maximum(n - 1, 0)[:, None, None, None]  # [B, 1, 1, 1]
        row = jnp.take_along_axis(p, newest[..., None], axis=3)
        part = jnp.take_along_axis(share, newest, axis=3)[..., None]
        seen = seen._replace(last_attn=jnp.sum(row * part, axis=(2, 3)))
    return seen


def merge(a: Partial, b: Partial) -> Partial:
    """Joins the attention over two disjoint segments of keys; associative."""
    m = jnp.maximum(a.max_logit, b.max_logit)
    base = jnp.where(jnp.isfinite(m), m, 0.0)
    wa, wb = jnp.exp(a.max_logit - base), jnp.exp(b.max_logit - base)
    return Partial(
        out=a.out * wa[..., None] + b.out * wb[..., None],
        max_logit=m,
        denominator=a.denominator * wa + b.denominator * wb,
    )


def normalize(partial: Partial) -> Float[Array, "B K G T D"]:
    """The attention output, float32; zero where a query saw no key."""
    seen = partial.denominator > 0
    return jnp.where(
        seen[..., None],
        partial.out / jnp.where(seen, partial.denominator, 1.0)[..., None],
        0.0,
    )


def _products(
    q: Float[Array, "B K G 1 D"], k: Float[Array, "B K C D"]
) -> Float[Array, "B K G 1 C"]:
    """q . k for one query per row, the form that each backend multiplies fastest."""
    return jax.lax.platform_dependent(
        q, k, cpu=_keys_first_products, default=_textbook_products
    )


def _textbook_products(q, k):
    return jnp.einsum("bkgtd,bkcd->bkgtc", q, k, preferred_element_type=jnp.float32)


def _keys_first_products(q, k):
    """XLA's CPU backend reads the larger operand 1.7 times faster when it is first.

    The barrier keeps the compiler from swapping the operands back.
    """
    products = jnp.einsum(
        "hcd,hnd->hcn",
        rearrange(k, "b k c d -> (b k) c d"),
        rearrange(q, "b k g t d -> (b k) (g t) d"),
        preferred_element_type=jnp.float32,
    )
    products = jax.lax.optimization_barrier(products)
    heads, group = q.shape[1:3]
    return rearrange(products, "(b k) c (g t) -> b k g t c", k=heads, g=group)
