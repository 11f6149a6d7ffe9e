"""Masked attention over slots, with the importance statistics that policies need.

Plain `jax.numpy`: the meaning every kernel has to agree with.
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from kvjax.types import WEIGHTS, Observation, Partial

NEVER = jnp.iinfo(jnp.int32).max  # an empty slot is visible to no position
LOWEST = -1e30  # stands in for the largest score of a query that sees no key


def attend(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K C D"],
    v: Float[Array, "B K C D"],
    pos: Int[Array, "B K C"],
    q_pos: Int[Array, "B T"],
    n: Int[Array, "B"],
    needs: frozenset[str] = frozenset(),
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

    Returns:
      The unnormalised output, and the statistics asked for.
    """
    length, depth = q.shape[3:]
    seen_from = jnp.where(pos < 0, NEVER, pos)[:, :, None, None]
    visible = seen_from <= q_pos[:, None, None, :, None]  # [B, K, 1, T, C]
    scores = _products(q, k) if length == 1 else _textbook_products(q, k)
    scores = jnp.where(visible, scores * depth**-0.5, -jnp.inf)
    m = jnp.max(scores, axis=-1)
    p = jnp.exp(scores - jnp.maximum(m, LOWEST)[..., None])
    l = jnp.sum(p, axis=-1)  # noqa: E741
    o = jnp.einsum(
        "bkgtc,bkcd->bkgtd", p.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return Partial(o, m, l), _observed(p, l, n, q_pos, needs & WEIGHTS)


def _observed(
    p: Float[Array, "B K G T C"],
    l: Float[Array, "B K G T"],  # noqa: E741
    n: Int[Array, "B"],
    q_pos: Int[Array, "B T"],
    needs: frozenset[str],
) -> Observation:
    """The statistics asked for, from unnormalised weights and their sums."""
    seen = Observation(n=n, positions=q_pos)
    if not needs:
        return seen
    group, length = p.shape[2:4]
    real = jnp.arange(length)[None, :] < n[:, None]
    share = jnp.where(real[:, None, None] & (l > 0), 1.0 / l, 0.0)
    if "weights" in needs:
        seen = seen._replace(weights=p * share[..., None])
    share = share / group
    if "mass" in needs or length == 1:
        mass = jnp.matmul(  # a row of shares times all weights sums them in one pass
            rearrange(share, "b k g t -> b k 1 (g t)"),
            rearrange(p, "b k g t c -> b k (g t) c"),
            precision=jax.lax.Precision.HIGHEST,
        )[:, :, 0]
        seen = seen._replace(mass=mass)
        if length == 1:  # one query: its weights are all there is to sum
            return seen._replace(mass_sq=mass * mass, last=mass)
    if "mass_sq" in needs:
        mean = jnp.sum(p * share[..., None], axis=2)  # [B, K, T, C]
        seen = seen._replace(mass_sq=jnp.sum(mean * mean, axis=2))
    if "last" in needs:
        newest = jnp.maximum(n - 1, 0)[:, None, None, None]  # [B, 1, 1, 1]
        row = jnp.take_along_axis(p, newest[..., None], axis=3)
        part = jnp.take_along_axis(share, newest, axis=3)[..., None]
        seen = seen._replace(last=jnp.sum(row * part, axis=(2, 3)))
    return seen


def merge(a: Partial, b: Partial) -> Partial:
    """Joins the attention over two disjoint segments of keys; associative."""
    m = jnp.maximum(a.m, b.m)
    base = jnp.where(jnp.isfinite(m), m, 0.0)
    wa, wb = jnp.exp(a.m - base), jnp.exp(b.m - base)
    return Partial(
        o=a.o * wa[..., None] + b.o * wb[..., None], m=m, l=a.l * wa + b.l * wb
    )


def finish(partial: Partial) -> Float[Array, "B K G T D"]:
    """The attention output, float32; zero where a query saw no key."""
    seen = partial.l > 0
    return jnp.where(
        seen[..., None], partial.o / jnp.where(seen, partial.l, 1.0)[..., None], 0.0
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
