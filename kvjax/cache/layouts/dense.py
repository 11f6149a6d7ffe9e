"""Dense slots: every head of every row owns C slots of one contiguous array.

::

    slot        0    1    2    3    4    5    6    7        C = 8
    position    0    9   -1    3   -1   11   10   -1
                |    |    |                                 live: 0 3 9 10 11
                k,v  k,v  empty, will take the next pair

Attention reads positions, never slot numbers, so pairs may lie in any order: an
eviction only marks slots empty, and new pairs move into them (`claim`, `write`).
Nothing is copied to make room. `compact` is the other way, and the one that changes C.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax import attention
from kvjax.attention.stored import Pairs, Stored
from kvjax.cache.codecs import Codec, plain
from kvjax.cache.layouts import groups
from kvjax.cache.layouts.base import Layout, first_of, insert_rows, mark, put
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


class Residual(Struct):
    """The first S and the newest R pairs of every row as they were.

    Token p lies at p, or from S on at S + p mod R. Of keys that are encoded in groups
    it is slot s that lies at s mod R, as a group is of neighbouring slots.

    Attributes:
      k: [B, K, S + R, D].
      v: [B, K, S + R, D].
      positions: i32[B, K, S + R]; -1 if there is none yet.
    """

    k: Array
    v: Array
    positions: Array


class DenseLayer(Struct):
    """One layer's pairs.

    Attributes:
      k: stored keys, logically [B, K, C, D].
      v: stored values, logically [B, K, C, D].
      positions: i32[B, K, C], the true position of each pair in its row; -1 if empty.
      residual: first and newest pairs unencoded, None if the codec keeps none.
      codec: how `k` and `v` are stored.
      dtype: of decoded keys and values, a name.
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
    """An empty layer of `capacity` slots per head."""
    shape = (batch, spec.num_kv_heads, capacity, spec.head_dim)
    whole = (*shape[:2], groups.rounded(capacity, codec.key), shape[3])
    return DenseLayer(
        k=codec.key.init(whole, dtype),
        v=_placed(codec, codec.value.init(shape, dtype)),
        positions=jnp.full(shape[:3], EMPTY, jnp.int32),
        residual=_empty_ring(codec, shape, dtype),
        codec=codec,
        dtype=jnp.dtype(dtype).name,
    )


def _placed(codec: Codec, v: PyTree) -> PyTree:
    """Values where the codec has them."""
    return host.to_host(v) if codec.value.on_host else v


def _empty_ring(codec: Codec, shape: tuple[int, ...], dtype) -> Residual | None:
    """Room for what the codec leaves as it is of (B, K, C, D); None if nothing."""
    size = codec.sinks + codec.residual_length
    if not size:
        return None
    ring = (*shape[:2], size, shape[3])
    empty = jnp.full(ring[:3], EMPTY, jnp.int32)
    return Residual(jnp.zeros(ring, dtype), jnp.zeros(ring, dtype), empty)


def keys(layer: DenseLayer) -> Array:
    """[B, K, C, D]."""
    decoded = layer.codec.key.decode(layer.k, jnp.dtype(layer.dtype))
    decoded = decoded[:, :, : layer.positions.shape[2]]  # of whole groups
    return _with_residual(layer, decoded, "k")


def values(layer: DenseLayer) -> Array:
    """[B, K, C, D]."""
    stored = host.to_device(layer.v)
    return _decoded_values(layer, stored)


def _all_slots(positions: Int[Array, "B K C"]) -> Int[Array, "B K C"]:
    slots = jnp.arange(positions.shape[2], dtype=jnp.int32)
    return jnp.broadcast_to(slots, positions.shape)


def _decoded_values(
    layer: DenseLayer, stored: PyTree, slots: Int[Array, "B K N"] | None = None
) -> Array:
    """[B, K, N, D] of what is stored in these slots, or in all."""
    decoded = layer.codec.value.decode(stored, jnp.dtype(layer.dtype))
    return _with_residual(layer, decoded, "v", slots)


def _with_residual(
    layer: DenseLayer,
    decoded: Array,
    which: str,
    slots: Int[Array, "B K N"] | None = None,
) -> Array:
    """First and newest pairs in the place of their decoded codes."""
    ring, positions = layer.residual, layer.positions
    if ring is None:
        return decoded
    if slots is None:
        slots = _all_slots(positions)
    else:
        positions = jnp.take_along_axis(positions, slots, axis=2)
    place = _place(layer.codec, positions, slots)  # of an empty slot, no matter
    newest = jnp.take_along_axis(ring.positions, place, axis=2) == positions
    newest = (newest & (positions >= 0))[..., None]
    as_they_were = jnp.take_along_axis(getattr(ring, which), place[..., None], axis=2)
    return jnp.where(newest, as_they_were, decoded)


def _place(
    codec: Codec, positions: Int[Array, "*axes"], slots: Int[Array, "*axes"]
) -> Int[Array, "*axes"]:
    """Where a `Residual` has these tokens, if it has them."""
    if _in_groups(codec):
        return slots % codec.residual_length
    first, newest = codec.sinks, max(codec.residual_length, 1)
    later = jnp.minimum(first + positions % newest, first + codec.residual_length - 1)
    return jnp.where(positions < first, positions, later)


def free_slots(positions: Int[Array, "B K C"], count: int) -> Int[Array, "B K T"]:
    """The first `count` empty slots of every head, C where there are fewer."""
    return first_of(positions < 0, count)


def claim(
    layer: DenseLayer, per_slot: PyTree, positions: Int[Array, "B T"], n: Array
) -> tuple[DenseLayer, PyTree, Int[Array, "B K T"], Bool[Array, "B K"]]:
    """Gives the first `n` of T new pairs of every row an empty slot each.

    The pairs themselves are still to be written there: by `write`, or by a kernel.

    Args:
      layer: the layer to be written to.
      per_slot: the policy's statistics; those of the slots claimed become zero.
      positions: of the new tokens.
      n: real tokens per row, the others are padding and get none.

    Returns:
      The layer with the new positions, the statistics, the slots (C for none), and for
      every head whether some pair found no empty slot (it is dropped, and the caller
      raises the sticky error bit).
    """
    capacity, length = layer.positions.shape[2], positions.shape[1]
    slots = free_slots(layer.positions, length)
    real = jnp.arange(length, dtype=jnp.int32)[None, :] < n[:, None]
    overflow = jnp.any(real[:, None] & (slots >= capacity), axis=-1)
    slots = jnp.where(real[:, None], slots, capacity)  # out of range: not written
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
    """`write`, of keys [B, K, T, D] whose values are still to come."""
    codec, ring, capacity = layer.codec.key, layer.residual, layer.positions.shape[2]
    if _in_groups(layer.codec):
        stored = groups.with_new(layer.k, codec, ring.k, k, slots, capacity)
    else:
        put_new = lambda leaf, new: put(leaf, slots, new)
        stored = jax.tree.map(put_new, layer.k, codec.encode(k))
    layer = layer.replace(k=stored)
    if ring is None:
        return layer
    here = _written(layer, slots, positions)
    place = _places(layer.codec, here, slots, ring)
    return layer.replace(
        residual=ring.replace(
            k=put(ring.k, place, k), positions=put(ring.positions, place, here)
        )
    )


def exchange_values(
    layer: DenseLayer,
    v: Array,
    slots: Int[Array, "B K T"],
    positions: Int[Array, "B T"],
    wanted: Int[Array, "B K N"],
) -> tuple[DenseLayer, Array]:
    """Writes values [B, K, T, D] of keys that are written, and reads [B, K, N, D]."""
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
    """The layer with these values, the last of them in its residual too."""
    layer, ring = layer.replace(v=stored), layer.residual
    if ring is None:
        return layer
    here = _written(layer, slots, positions)
    place = _places(layer.codec, here, slots, ring)
    return layer.replace(residual=ring.replace(v=put(ring.v, place, v)))


def _written(
    layer: DenseLayer, slots: Int[Array, "B K T"], positions: Int[Array, "B T"]
) -> Int[Array, "B K T"]:
    """Positions of new pairs, -1 where they are given no slot."""
    here = jnp.broadcast_to(positions[:, None], slots.shape)
    return jnp.where(slots < layer.positions.shape[2], here, EMPTY)


def _places(
    codec: Codec,
    positions: Int[Array, "B K T"],
    slots: Int[Array, "B K T"],
    ring: Residual,
) -> Int[Array, "B K T"]:
    """Where the first and newest of these pairs go; those at -1 are none."""
    order = jnp.where(positions < 0, EMPTY, slots) if _in_groups(codec) else positions
    newest = jnp.max(order, axis=-1, keepdims=True)
    kept = (order > newest - codec.residual_length) | (positions < codec.sinks)
    beyond = ring.positions.shape[2]
    return jnp.where(kept & (positions >= 0), _place(codec, positions, slots), beyond)


def _in_groups(codec: Codec) -> bool:
    return codec.key.group_size > 1


def evict(layer: DenseLayer, mask: Bool[Array, "B K C"]) -> DenseLayer:
    """Marks the slots in the mask empty."""
    return layer.replace(positions=jnp.where(mask, EMPTY, layer.positions))


def encode(layer: DenseLayer, codec: Codec) -> DenseLayer:
    """The same pairs, stored by another codec."""
    k, v, positions = keys(layer), values(layer), layer.positions
    ring = _empty_ring(codec, k.shape, k.dtype)
    if ring is not None:
        place = _places(codec, positions, _all_slots(positions), ring)
        new = k, v, positions
        put_new = lambda leaf, new: put(leaf, place, new)
        ring = Residual(*map(put_new, (ring.k, ring.v, ring.positions), new))
    return layer.replace(
        k=groups.all_of(codec.key, k),
        v=_placed(codec, codec.value.encode(v)),
        residual=ring,
        codec=codec,
    )


def compact(
    layer: DenseLayer, per_slot: PyTree, capacity: int
) -> tuple[DenseLayer, PyTree]:
    """Moves the live pairs, in the order of their positions, to the first slots.

    The result has `capacity` slots; a head must not hold more pairs than that.
    """
    last = jnp.iinfo(jnp.int32).max
    late = jnp.where(layer.positions < 0, last, layer.positions)
    order = jnp.argsort(late, axis=-1, stable=True)[..., :capacity]
    short = capacity - order.shape[-1]

    def move(leaf, fill=0):
        if host.is_host(leaf):  # an empty slot may hold any number
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


def attend(
    layer: DenseLayer,
    q: Array,
    positions: Array,
    n: Array,
    stats: frozenset[str],
    implementation: str | None,
    scoring,
    turned=None,
):
    """`attention.attend` over all slots."""
    k, v = _stored(layer)
    if turned:
        k = turned(keys(layer))
    given = q, k, v, layer.positions, positions, n
    return attention.attend(*given, stats, implementation, scoring)


def write_attend(
    layer: DenseLayer, q, k, v, slots, positions, n, stats, implementation, scoring
):
    """Both in one kernel, where there is one that can write what is stored."""
    how = stats, implementation, scoring
    if layer.codec.value.on_host:
        if all(host.can_write(leaf, k.shape[2]) for leaf in jax.tree.leaves(layer.v)):
            return None
        return _attend_beside(layer, q, k, v, slots, positions, n, *how)
    if layer.residual is not None:
        return None
    if not attention.fuses_write(q, *_stored(layer), *how):
        return None
    new_k, new_v = layer.codec.key.encode(k), layer.codec.value.encode(v)
    layer = layer.replace(
        k=_with_scales(layer.k, new_k, slots), v=_with_scales(layer.v, new_v, slots)
    )
    new = numbers_of(new_k)[:, :, 0], numbers_of(new_v)[:, :, 0], slots[..., 0]
    given = q, *new, *_stored(layer), layer.positions, positions, n
    partial, seen, k, v = attention.write_attend(*given, *how)
    layer = layer.replace(k=_with_numbers(layer.k, k), v=_with_numbers(layer.v, v))
    return layer, partial, seen


def _attend_beside(layer: DenseLayer, q, k, v, slots, positions, n, *how):
    """Both, for the values of a host that cannot write so many: all go to and fro."""
    here = write(layer.replace(v=host.to_device(layer.v)), k, v, slots, positions)
    return here.replace(v=host.to_host(here.v)), *attend(here, q, positions, n, *how)


def _stored(layer: DenseLayer) -> tuple[Pairs, Pairs]:
    """Keys and values as attention reads them: stored, where nothing overlies them."""
    arrays = layer.k, host.to_device(layer.v)
    if (layer.codec.key, layer.codec.value.decode) == (plain, plain.decode):
        return arrays
    if layer.residual is not None:
        return keys(layer), values(layer)
    shapes = jax.eval_shape(keys, layer), jax.eval_shape(values, layer)
    how = layer.codec.key, layer.codec.value
    return tuple(
        Stored(stored, codec, shape.shape, shape.dtype)
        for stored, codec, shape in zip(arrays, how, shapes, strict=True)
    )


def _with_numbers(stored: PyTree, numbers: Array) -> PyTree:
    """What is stored, with these in the place of `numbers_of`."""
    coded = isinstance(stored, Codes)
    return stored._replace(codes=numbers) if coded else numbers


def _with_scales(stored: PyTree, new: PyTree, slots: Int[Array, "B K 1"]) -> PyTree:
    """What is stored, with the new pairs' scales, which no kernel writes."""
    if not isinstance(stored, Codes):
        return stored
    return stored._replace(scale=mark(stored.scale, slots, new.scale))


def check(codec: Codec) -> None:
    """Raises UserError for tokens that are encoded together where this cannot be."""
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
    insert=insert_rows,
    attend=attend,
    write_attend=write_attend,
    stored=lambda layer: (layer.k, layer.v, layer.residual),
    check=check,
    write_keys=write_keys,
    exchange_values=exchange_values,
    encode=encode,
)
