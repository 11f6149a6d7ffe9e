"""Helpers that process pairs in the order of their positions, not of their slots."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


class Order(NamedTuple):
    """The slots of every head, sorted by position; empty ones come last.

    Attributes:
      slots: i32[B, K, C], the slot of each rank.
      ranks: i32[B, K, C], the rank of each slot.
    """

    slots: Int[Array, "B K C"]
    ranks: Int[Array, "B K C"]


def sort_by_position(pos: Int[Array, "B K C"], among: Bool[Array, "B K C"]) -> Order:
    """Sorts the slots in `among` by position: two sorts of C integers per head."""
    last = jnp.iinfo(jnp.int32).max
    slots = jnp.argsort(jnp.where(among, pos, last), axis=-1, stable=True)
    return Order(slots, jnp.argsort(slots, axis=-1))


def take(x: Shaped[Array, "B K *G C"], index: Int[Array, "B K C"]) -> Array:
    """Reorders the last axis of every head by `index`; *G are any axes between."""
    extra = tuple(range(2, x.ndim - 1))
    return jnp.take_along_axis(x, jnp.expand_dims(index, extra), axis=-1)


def pooled(
    x: Float[Array, "B K *G C"],
    pos: Int[Array, "B K C"],
    among: Bool[Array, "B K C"],
    kernel: int,
    pool: str,
) -> Float[Array, "B K *G C"]:
    """Pools x over each pair of `among` and its neighbours in the text.

    Args:
      x: finite on `among`.
      pos: positions of the slots.
      among: the pairs to pool; the result is undefined elsewhere.
      kernel: number of pairs in the pooling window, odd.
      pool: 'average', which counts zeros beyond both ends, or 'max'.
    """
    order = sort_by_position(pos, among)
    included = jnp.expand_dims(take(among, order.slots), tuple(range(2, x.ndim - 1)))
    if pool == "max":
        row = jnp.where(included, take(x, order.slots), -jnp.inf)
        row = _slide(row, kernel, -jnp.inf, jax.lax.max)
    else:
        row = jnp.where(included, take(x, order.slots), 0.0)
        row = _slide(row, kernel, 0.0, jax.lax.add) / kernel
    return take(row, order.ranks)


def segments(
    x: Float[Array, "B K C"], pos: Int[Array, "B K C"], size: int
) -> Float[Array, "B K C"]:
    """Returns the mean of x over the live pairs with the same position // size."""
    order = sort_by_position(pos, pos >= 0)
    chunk = take(pos, order.slots) // size  # of each rank; -1 for empty slots
    opens = chunk[..., 1:] != chunk[..., :-1]
    number = jnp.cumsum(opens, axis=-1, dtype=jnp.int32)  # chunks counted from 0
    number = jnp.pad(number, ((0, 0), (0, 0), (1, 0)))

    def mean(values, number):
        total = jax.ops.segment_sum(values, number, values.shape[0])
        count = jax.ops.segment_sum(jnp.ones_like(values), number, values.shape[0])
        return (total / jnp.maximum(count, 1.0))[number]

    return take(jax.vmap(jax.vmap(mean))(take(x, order.slots), number), order.ranks)


def _slide(
    x: Float[Array, "B K *G C"], kernel: int, start: float, join: Callable
) -> Array:
    """Reduces a sliding window along the last axis; the length stays the same."""
    window = (1,) * (x.ndim - 1) + (kernel,)
    side = (kernel // 2, kernel // 2)
    padding = ((0, 0),) * (x.ndim - 1) + (side,)
    return jax.lax.reduce_window(x, start, join, window, (1,) * x.ndim, padding)
