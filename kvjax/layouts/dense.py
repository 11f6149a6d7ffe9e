"""Dense slots: every head of every row owns C slots of one contiguous array.

::

    slot        0    1    2    3    4    5    6    7        C = 8
    pos         0    9   -1    3   -1   11   10   -1
                |    |    |                                 live: 0 3 9 10 11
                k,v  k,v  empty, will take the next pair

Attention reads positions, never slot numbers, so pairs may lie in any order: an
eviction only marks slots empty, and new pairs move into them (`append`). Nothing is
copied to make room. `compact` is the other way, and the one that changes C.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.codecs import Codec
from kvjax.types import EMPTY, ModelSpec, PyTree, Stats


@flax.struct.dataclass
class DenseLayer:
    """One layer's pairs.

    Attributes:
      k: stored keys, logically [B, K, C, D], after RoPE.
      v: stored values, logically [B, K, C, D].
      pos: i32[B, K, C], the true position of each pair in its row; -1 if empty.
    """

    k: PyTree
    v: PyTree
    pos: Int[Array, "B K C"]


def init(
    spec: ModelSpec, batch: int, capacity: int, codec: Codec, dtype: jnp.dtype
) -> DenseLayer:
    """An empty layer of `capacity` slots per head."""
    shape = (batch, spec.num_kv_heads, capacity, spec.head_dim)
    return DenseLayer(
        k=codec.init(shape, dtype),
        v=codec.init(shape, dtype),
        pos=jnp.full(shape[:3], EMPTY, jnp.int32),
    )


def live(layer: DenseLayer) -> Int[Array, "B K"]:
    """How many pairs each head holds."""
    return jnp.sum(layer.pos >= 0, axis=-1, dtype=jnp.int32)


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


def append(
    layer: DenseLayer,
    stats: Stats,
    codec: Codec,
    k: Array,
    v: Array,
    pos: Int[Array, "B T"],
    n: Int[Array, "B"],
) -> tuple[DenseLayer, Stats, Bool[Array, ""]]:
    """Writes the first `n` of T new pairs of every row into empty slots.

    Args:
      layer: the layer written to.
      stats: the policy's statistics; those of the slots written become zero.
      codec: how pairs are stored.
      k: new keys [B, K, T, D].
      v: new values [B, K, T, D].
      pos: positions of the new tokens.
      n: real tokens per row, the others are padding and are not written.

    Returns:
      The layer, the statistics, and whether some pair found no empty slot (it is
      dropped, and the caller raises the sticky error bit).
    """
    batch, heads, capacity = layer.pos.shape
    length = pos.shape[1]
    slots = free_slots(layer.pos, length)
    real = jnp.arange(length, dtype=jnp.int32)[None, :] < n[:, None]
    overflow = jnp.any(real[:, None] & (slots >= capacity))
    slots = jnp.where(real[:, None], slots, capacity)  # out of range: not written
    rows = jnp.arange(batch)[:, None, None]
    columns = jnp.arange(heads)[None, :, None]

    def write(slot_leaf, new):
        return slot_leaf.at[rows, columns, slots].set(
            new, mode="drop", unique_indices=True
        )

    def reset(leaf):
        return write(leaf, jnp.zeros((), leaf.dtype))

    new_pos = jnp.broadcast_to(pos[:, None], slots.shape)
    written = DenseLayer(
        k=jax.tree.map(write, layer.k, codec.encode(k)),
        v=jax.tree.map(write, layer.v, codec.encode(v)),
        pos=write(layer.pos, new_pos),
    )
    fresh = stats._replace(slots=jax.tree.map(reset, stats.slots))
    return written, fresh, overflow


def compact(layer: DenseLayer, stats: Stats, capacity: int) -> tuple[DenseLayer, Stats]:
    """Moves the live pairs, in the order of their positions, to the first slots.

    The result has `capacity` slots; a head must not hold more pairs than that.
    """
    late = jnp.where(layer.pos < 0, jnp.iinfo(jnp.int32).max, layer.pos)
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
        pos=move(layer.pos, EMPTY),
    )
    return moved, stats._replace(slots=jax.tree.map(move, stats.slots))
