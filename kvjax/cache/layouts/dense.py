"""Dense slots: every head of every row owns C slots of one contiguous array.

::

    slot        0    1    2    3    4    5    6    7        C = 8
    pos         0    9   -1    3   -1   11   10   -1
                |    |    |                                 live: 0 3 9 10 11
                k,v  k,v  empty, will take the next pair

Attention reads positions, never slot numbers, so pairs may lie in any order: an
eviction only marks slots empty, and new pairs move into them (`claim`, `write`).
Nothing is copied to make room. `compact` is the other way, and the one that changes C.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kvjax.cache.codecs.base import Codec
from kvjax.types import EMPTY, ModelSpec, PyTree, Stats


@flax.struct.dataclass
class DenseLayer:
    """One layer's pairs.

    Attributes:
      k: stored keys, logically [B, K, C, D], after RoPE.
      v: stored values, logically [B, K, C, D].
      positions: i32[B, K, C], the true position of each pair in its row; -1 if empty.
    """

    k: PyTree
    v: PyTree
    positions: Int[Array, "B K C"]


def init(
    spec: ModelSpec, batch: int, capacity: int, codec: Codec, dtype: jnp.dtype
) -> DenseLayer:
    """An empty layer of `capacity` slots per head."""
    shape = (batch, spec.num_kv_heads, capacity, spec.head_dim)
    return DenseLayer(
        k=codec.init(shape, dtype),
        v=codec.init(shape, dtype),
        positions=jnp.full(shape[:3], EMPTY, jnp.int32),
    )


def live(layer: DenseLayer) -> Int[Array, "B K"]:
    """How many pairs each head holds."""
    return jnp.sum(layer.positions >= 0, axis=-1, dtype=jnp.int32)


def free_slots(pos: Int[Array, "B K C"], count: int) -> Int[Array, "B K T"]:
    """The first `count` empty slots of every head, C where there are fewer."""
    capacity = pos.shape[-1]
    empty = pos < 0
    if count == 1:
        first = jnp.argmax(empty, axis=-1, keepdims=True).astype(jnp.int32)
        return jnp.where(jnp.any(empty, axis=-1, keepdims=True), first, capacity)
    running = jnp.cumsum(empty, axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, count + 1, dtype=jnp.int32)
    find = functools.partial(jnp.searchsorted, v=wanted, method="scan_unrolled")
    return jax.vmap(jax.vmap(find))(running).astype(jnp.int32)


def claim(
    layer: DenseLayer, stats: Stats, pos: Int[Array, "B T"], n: Int[Array, "B"]
) -> tuple[DenseLayer, Stats, Int[Array, "B K T"], Bool[Array, "B K"]]:
    """Gives the first `n` of T new pairs of every row an empty slot each.

    The pairs themselves are still to be written there: by `write`, or by a kernel.

    Args:
      layer: the layer to be written to.
      stats: the policy's statistics; those of the slots claimed become zero.
      pos: positions of the new tokens.
      n: real tokens per row, the others are padding and get none.

    Returns:
      The layer with the new positions, the statistics, the slots (C for none), and for
      every head whether some pair found no empty slot (it is dropped, and the caller
      raises the sticky error bit).
    """
    capacity, length = layer.positions.shape[2], pos.shape[1]
    slots = free_slots(layer.positions, length)
    real = jnp.arange(length, dtype=jnp.int32)[None, :] < n[:, None]
    overflow = jnp.any(real[:, None] & (slots >= capacity), axis=-1)
    slots = jnp.where(real[:, None], slots, capacity)  # out of range: not written
    put = _mark if length == 1 else _put
    zeros = lambda leaf: put(leaf, slots, jnp.zeros((), leaf.dtype))
    fresh = stats._replace(per_slot=jax.tree.map(zeros, stats.per_slot))
    new_pos = put(layer.positions, slots, jnp.broadcast_to(pos[:, None], slots.shape))
    return layer.replace(positions=new_pos), fresh, slots, overflow


def write(
    layer: DenseLayer, codec: Codec, k: Array, v: Array, slots: Int[Array, "B K T"]
) -> DenseLayer:
    """Writes new keys and values [B, K, T, D] into the slots claimed for them."""
    put = lambda leaf, new: _put(leaf, slots, new)
    return layer.replace(
        k=jax.tree.map(put, layer.k, codec.encode(k)),
        v=jax.tree.map(put, layer.v, codec.encode(v)),
    )


def compact(layer: DenseLayer, stats: Stats, capacity: int) -> tuple[DenseLayer, Stats]:
    """Moves the live pairs, in the order of their positions, to the first slots.

    The result has `capacity` slots; a head must not hold more pairs than that.
    """
    late = jnp.where(layer.positions < 0, jnp.iinfo(jnp.int32).max, layer.positions)
    order = jnp.argsort(late, axis=-1, stable=True)[..., :capacity]
    short = capacity - order.shape[-1]

    def move(leaf, fill=0):
        index = order.reshape(order.shape + (1,) * (leaf.ndim - 3))
        moved = jnp.take_along_axis(leaf, index, axis=2)
        pad = [(0, 0)] * leaf.ndim
        pad[2] = (0, short)
        return jnp.pad(moved, pad, constant_values=fill) if short > 0 else moved

    moved = DenseLayer(
        k=jax.tree.map(move, layer.k),
        v=jax.tree.map(move, layer.v),
        positions=move(layer.positions, EMPTY),
    )
    return moved, stats._replace(per_slot=jax.tree.map(move, stats.per_slot))


def _put(
    leaf: Array, slots: Int[Array, "B K T"], new: Array
) -> Shaped[Array, "B K C ..."]:
    """Puts `new` into slots; those of C or more are not written."""
    batch, heads = slots.shape[:2]
    rows = jnp.arange(batch)[:, None, None]
    columns = jnp.arange(heads)[None, :, None]
    return leaf.at[rows, columns, slots].set(new, mode="drop", unique_indices=True)


def _mark(
    leaf: Shaped[Array, "B K C ..."], slot: Int[Array, "B K 1"], new: Array
) -> Shaped[Array, "B K C ..."]:
    """`_put` for one slot of small leaves; on TPU a scatter is slow, a select not."""
    here = jnp.arange(leaf.shape[2], dtype=jnp.int32)[None, None] == slot
    return jnp.where(here.reshape(here.shape + (1,) * (leaf.ndim - 3)), new, leaf)
