"""Dense slots: every head of every row owns C slots of one contiguous array.

::

    slot        0    1    2    3    4    5    6    7        C = 8
    position    0    9   -1    3   -1   11   10   -1
                |    |    |                                 live: 0 3 9 10 11
                k,v  k,v  empty, will take the next pair

Attention masks by positions, never by slot numbers, so pairs may lie in any order. An
eviction only marks slots as empty, and new pairs are written there (`claim`, `write`):
nothing is copied. `compact` moves the live pairs together, and may change C.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax import attention
from kvjax.attention import AttentionSpec, Pairs, Queries
from kvjax.attention.stored import Stored
from kvjax.cache.codecs import Codec, plain
from kvjax.cache.layouts import groups, residual
from kvjax.cache.layouts.base import (
    Layout,
    first_of,
    insert_rows,
    live_bytes,
    mark,
    partition_rows,
    put,
    select_rows,
)
from kvjax.cache.layouts.residual import Residual
from kvjax.parallel import host
from kvjax.types import (
    EMPTY,
    Codes,
    ModelSpec,
    PyTree,
    Struct,
    UserError,
    numbers_of,
    static_field,
)


class DenseLayer(Struct):
    """One layer's pairs.

    Attributes:
      k: stored keys, logically [B, K, C, D].
      v: stored values, logically [B, K, C, D].
      positions: i32[B, K, C], the position of each slot's token; -1 if empty.
      residual: the unencoded first and newest pairs; None if the codec asks for none.
      codec: encodes and decodes `k` and `v`.
      dtype: name of the dtype of decoded keys and values.
    """

    k: PyTree
    v: PyTree
    positions: Array
    residual: Residual | None
    codec: Codec = static_field()
    dtype: str = static_field()


def init(
    spec: ModelSpec, batch: int, capacity: int, codec: Codec, dtype: jnp.dtype
) -> DenseLayer:
    """Returns an empty layer of `capacity` slots per head."""
    shape = (batch, spec.num_kv_heads, capacity, spec.head_dim)
    whole = (*shape[:2], groups.rounded(capacity, codec.key), shape[3])
    return DenseLayer(
        k=codec.key.init(whole, dtype),
        v=_placed(codec, codec.value.init(shape, dtype)),
        positions=jnp.full(shape[:3], EMPTY, jnp.int32),
        residual=residual.empty(codec, shape, dtype),
        codec=codec,
        dtype=jnp.dtype(dtype).name,
    )


def _placed(codec: Codec, v: PyTree) -> PyTree:
    """Moves stored values to host memory if the codec keeps them there."""
    return host.to_host(v) if codec.value.on_host else v


def keys(layer: DenseLayer) -> Array:
    """Returns the decoded keys, [B, K, C, D]."""
    decoded = layer.codec.key.decode(layer.k, jnp.dtype(layer.dtype))
    # The last group of keys may reach beyond the capacity.
    decoded = decoded[:, :, : layer.positions.shape[2]]
    if layer.residual is None:
        return decoded
    return residual.overlay(
        decoded, layer.residual.k, layer.residual, layer.codec, layer.positions
    )


def values(layer: DenseLayer) -> Array:
    """Returns the decoded values, [B, K, C, D]."""
    return _decoded_values(layer, host.to_device(layer.v))


def _decoded_values(
    layer: DenseLayer, stored: PyTree, slots: Int[Array, "B K N"] | None = None
) -> Array:
    """Decodes the values [B, K, N, D] stored in these slots, or in all."""
    decoded = layer.codec.value.decode(stored, jnp.dtype(layer.dtype))
    if layer.residual is None:
        return decoded
    return residual.overlay(
        decoded, layer.residual.v, layer.residual, layer.codec, layer.positions, slots
    )


def claim(
    layer: DenseLayer, per_slot: PyTree, positions: Int[Array, "B T"], n: Array
) -> tuple[DenseLayer, PyTree, Int[Array, "B K T"], Bool[Array, "B K"]]:
    """Assigns an empty slot to each of the first `n` of T new pairs of every row.

    `write` or a kernel then writes the pairs there.

    Args:
      layer: the layer to be written to.
      per_slot: the policy's statistics; those of the claimed slots become zero.
      positions: of the new tokens.
      n: real tokens per row; the others are padding and get no slot.

    Returns:
      The layer with the new positions, the statistics, the slots (C for none), and
      True for every head without enough empty slots. Its pairs without a slot are
      dropped, and the caller sets the sticky error bit.
    """
    capacity, length = layer.positions.shape[2], positions.shape[1]
    slots = first_of(layer.positions < 0, length)
    real = jnp.arange(length, dtype=jnp.int32)[None, :] < n[:, None]
    overflow = jnp.any(real[:, None] & (slots >= capacity), axis=-1)
    slots = jnp.where(real[:, None], slots, capacity)  # out of range: dropped
    written = mark if length == 1 else put
    zeros = lambda leaf: written(leaf, slots, jnp.zeros((), leaf.dtype))
    here = jnp.broadcast_to(positions[:, None], slots.shape)
    layer = layer.replace(positions=written(layer.positions, slots, here))
    return layer, jax.tree.map(zeros, per_slot), slots, overflow


def write(
    layer: DenseLayer,
    k: Array,
    v: Array,
    slots: Int[Array, "B K T"],
    positions: Int[Array, "B T"],
) -> DenseLayer:
    """Writes new keys and values [B, K, T, D] into the slots claimed for them."""
    layer = write_keys(layer, k, slots, positions)
    put_new = lambda leaf, new: put(leaf, slots, new)
    stored = jax.tree.map(put_new, layer.v, layer.codec.value.encode(v))
    return _with_values(layer, stored, v, slots, positions)


def write_keys(
    layer: DenseLayer,
    k: Array,
    slots: Int[Array, "B K T"],
    positions: Int[Array, "B T"],
) -> DenseLayer:
    """Writes keys [B, K, T, D]; `exchange_values` writes their values."""
    codec, capacity = layer.codec.key, layer.positions.shape[2]
    if codec.group_size > 1:
        stored = groups.with_new(layer.k, codec, layer.residual.k, k, slots, capacity)
    else:
        put_new = lambda leaf, new: put(leaf, slots, new)
        stored = jax.tree.map(put_new, layer.k, codec.encode(k))
    layer = layer.replace(k=stored)
    if layer.residual is None:
        return layer
    here = _written(layer, slots, positions)
    kept = residual.with_keys(layer.residual, layer.codec, k, here, slots)
    return layer.replace(residual=kept)


def exchange_values(
    layer: DenseLayer,
    v: Array,
    slots: Int[Array, "B K T"],
    positions: Int[Array, "B T"],
    wanted: Int[Array, "B K N"],
) -> tuple[DenseLayer, Array]:
    """Writes values [B, K, T, D], and reads the slots `wanted`, [B, K, N, D]."""
    leaves, structure = jax.tree.flatten(layer.v)
    new = jax.tree.leaves(layer.codec.value.encode(v))
    pairs = zip(leaves, new, strict=True)
    both = [host.exchange(leaf, slots, x, wanted) for leaf, x in pairs]
    stored, taken = map(structure.unflatten, zip(*both, strict=True))
    layer = _with_values(layer, stored, v, slots, positions)
    return layer, _decoded_values(layer, host.to_device(taken), wanted)


def _with_values(
    layer: DenseLayer, stored: PyTree, v: Array, slots: Array, positions: Array
) -> DenseLayer:
    """Replaces the stored values, and copies new ones to the residual."""
    layer = layer.replace(v=stored)
    if layer.residual is None:
        return layer
    here = _written(layer, slots, positions)
    kept = residual.with_values(layer.residual, layer.codec, v, here, slots)
    return layer.replace(residual=kept)


def _written(
    layer: DenseLayer, slots: Int[Array, "B K T"], positions: Int[Array, "B T"]
) -> Int[Array, "B K T"]:
    """Returns the positions of new pairs, -1 for those without a slot."""
    here = jnp.broadcast_to(positions[:, None], slots.shape)
    return jnp.where(slots < layer.positions.shape[2], here, EMPTY)


def evict(layer: DenseLayer, mask: Bool[Array, "B K C"]) -> DenseLayer:
    """Marks the slots in the mask as empty."""
    return layer.replace(positions=jnp.where(mask, EMPTY, layer.positions))


def release(layer: DenseLayer, rows: Int[Array, "N"]) -> DenseLayer:
    """Marks all slots of these rows as empty; rows of B or more are dropped."""
    empty = lambda positions: positions.at[rows].set(EMPTY, mode="drop")
    layer, kept = layer.replace(positions=empty(layer.positions)), layer.residual
    if kept is None:
        return layer
    return layer.replace(residual=kept.replace(positions=empty(kept.positions)))


def nbytes(layer: DenseLayer) -> tuple[int, int]:
    """Returns the bytes of live pairs, and of all slots with the residual."""
    return live_bytes(layer.positions, (layer.k, layer.v, layer.residual))


def encode(layer: DenseLayer, codec: Codec) -> DenseLayer:
    """Stores the same pairs by another codec."""
    k, v = keys(layer), values(layer)
    return layer.replace(
        k=groups.all_of(codec.key, k),
        v=_placed(codec, codec.value.encode(v)),
        residual=residual.of_pairs(codec, k, v, layer.positions),
        codec=codec,
    )


def compact(
    layer: DenseLayer, per_slot: PyTree, capacity: int
) -> tuple[DenseLayer, PyTree]:
    """Moves the live pairs to the first slots, in the order of their positions.

    The result has `capacity` slots; no head may hold more pairs than that.
    """
    last = jnp.iinfo(jnp.int32).max
    late = jnp.where(layer.positions < 0, last, layer.positions)
    order = jnp.argsort(late, axis=-1, stable=True)[..., :capacity]
    short = capacity - order.shape[-1]

    def move(leaf, fill=0):
        if host.is_host(leaf):  # `fill` is left out: an empty slot may hold any number
            return host.take(leaf, jnp.pad(order, [(0, 0), (0, 0), (0, max(short, 0))]))
        index = order.reshape(order.shape + (1,) * (leaf.ndim - 3))
        moved = jnp.take_along_axis(leaf, index, axis=2)
        pad = [(0, 0)] * leaf.ndim
        pad[2] = (0, short)
        return jnp.pad(moved, pad, constant_values=fill) if short > 0 else moved

    moved = layer.replace(
        k=jax.tree.map(move, layer.k),
        v=jax.tree.map(move, layer.v),
        positions=move(layer.positions, EMPTY),
    )
    return moved, jax.tree.map(move, per_slot)


def attend(layer: DenseLayer, queries: Queries, spec: AttentionSpec, rotate=None):
    """`attention.attend` over all slots."""
    pairs = _pairs(layer)
    if rotate:
        pairs = pairs._replace(k=rotate(keys(layer)))
    return attention.attend(queries, pairs, spec)


def write_attend(layer: DenseLayer, queries: Queries, k, v, slots, spec: AttentionSpec):
    """Writes and attends in one kernel, where one can write the stored dtype."""
    if layer.codec.value.on_host:
        if all(host.can_write(leaf, k.shape[2]) for leaf in jax.tree.leaves(layer.v)):
            return None
        return _attend_beside(layer, queries, k, v, slots, spec)
    if layer.residual is not None:
        return None
    if not attention.fuses_write(queries, _pairs(layer), spec):
        return None
    new_k, new_v = layer.codec.key.encode(k), layer.codec.value.encode(v)
    layer = layer.replace(
        k=_with_scales(layer.k, new_k, slots), v=_with_scales(layer.v, new_v, slots)
    )
    new = numbers_of(new_k)[:, :, 0], numbers_of(new_v)[:, :, 0], slots[..., 0]
    partial, seen, k, v = attention.write_attend(queries, _pairs(layer), *new, spec)
    layer = layer.replace(k=_with_numbers(layer.k, k), v=_with_numbers(layer.v, v))
    return layer, partial, seen


def _attend_beside(layer: DenseLayer, queries: Queries, k, v, slots, spec):
    """Writes and attends where the host cannot write so many of its values itself.

    All values cross the link to the device and back.
    """
    on_device = layer.replace(v=host.to_device(layer.v))
    here = write(on_device, k, v, slots, queries.positions)
    partial, seen = attend(here, queries, spec)
    return here.replace(v=host.to_host(here.v)), partial, seen


def _pairs(layer: DenseLayer) -> Pairs:
    """Returns the pairs for attention: decoded only if there is a residual."""
    arrays = layer.k, host.to_device(layer.v)
    if (layer.codec.key, layer.codec.value.decode) == (plain, plain.decode):
        return Pairs(*arrays, layer.positions)
    if layer.residual is not None:
        return Pairs(keys(layer), values(layer), layer.positions)
    shapes = jax.eval_shape(keys, layer), jax.eval_shape(values, layer)
    codecs = layer.codec.key, layer.codec.value
    stored = (
        Stored(array, codec, shape.shape, shape.dtype)
        for array, codec, shape in zip(arrays, codecs, shapes, strict=True)
    )
    return Pairs(*stored, layer.positions)


def _with_numbers(stored: PyTree, numbers: Array) -> PyTree:
    """Replaces the numbers of a stored tensor: its codes, or the tensor itself."""
    coded = isinstance(stored, Codes)
    return stored._replace(codes=numbers) if coded else numbers


def _with_scales(stored: PyTree, new: PyTree, slots: Int[Array, "B K 1"]) -> PyTree:
    """Writes the scales of new pairs, which no kernel writes."""
    if not isinstance(stored, Codes):
        return stored
    return stored._replace(scale=mark(stored.scale, slots, new.scale))


def check(codec: Codec) -> None:
    """Raises UserError for a codec whose groups of tokens cannot be stored."""
    size, newest = codec.key.group_size, codec.residual_length
    if codec.value.group_size > 1:
        raise UserError(
            f"codec {codec.name!r} encodes {codec.value.group_size} values together "
            f"({codec.value.name}), and the layout 'dense' writes them one by one: use "
            "a codec of values with group_size 1"
        )
    if size > 1 and (newest < size or codec.sinks):
        raise UserError(
            f"codec {codec.name!r} encodes {size} keys together ({codec.key.name}), "
            f"which wait in the residual: give it a residual_length of {size} at least "
            f"and no sinks, got {newest} and {codec.sinks}"
        )


LAYOUT = Layout(
    name="dense",
    init=init,
    positions=lambda layer: layer.positions,
    keys=keys,
    values=values,
    claim=claim,
    write=write,
    evict=evict,
    compact=compact,
    rows=select_rows,
    release=release,
    insert=insert_rows,
    partition=partition_rows,
    nbytes=nbytes,
    attend=attend,
    check=check,
    write_attend=write_attend,
    encode=encode,
    write_keys=write_keys,
    exchange_values=exchange_values,
)
