"""The interface of a layout: where KV pairs lie, and how they are written and read.

A layer of pairs is a pytree of the layout's own. Its arrays may lead with rows and
heads, or be one pool that rows and heads share: only the layout's functions index
them. To everything else a layer shows C slots per head of every row, in an order that
only `write`, `evict` and `compact` change; a policy's statistics [B, K, C, ...] follow
that order.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, Shaped

from kvjax.parallel import axes, host
from kvjax.types import PyTree


class Layout(NamedTuple):
    """Pure functions of a layer.

    Attributes:
      name: as in the registry, for reports.
      init: (spec, batch, capacity, codec, dtype) -> an empty layer.
      positions: layer -> i32[B, K, C], the position of the token in each slot; -1 if
        the slot is empty.
      keys, values: layer -> [B, K, C, D], decoded, as they were written.
      claim: (layer, per_slot, positions [B, T], n [B]) -> (layer, per_slot, slots
        [B, K, T], overflow [B, K]). Assigns an empty slot to each of the first n of T
        new pairs of every row (C for the others), marks it with the token's position
        and zeroes its statistics. `overflow` is True for heads without enough slots.
      write: (layer, k, v [B, K, T, D], slots, positions [B, T]) -> layer, with the
        pairs in the slots claimed for them.
      evict: (layer, mask [B, K, C]) -> layer, with the slots in the mask empty.
      compact: (layer, per_slot, capacity) -> (layer, per_slot) of `capacity` slots, of
        which the first hold the live pairs in the order of their positions.
      rows: (layer, chosen i32[N]) -> a layer of these N rows, for reading alone:
        eviction shows it to policies, a few rows at a time.
      release: (layer, rows i32[N]) -> layer, with all slots of these rows empty.
      insert: (layer, other, rows i32[N]) -> layer, with each of the N rows of `other`
        copied to the row that `rows` names. `other` stays valid, and may be inserted
        again. `release` and `insert` drop rows of B or more.
      partition: layer -> a `PartitionSpec` of mesh axes for each of its arrays.
      nbytes: layer -> (live, allocated), bytes of keys and values: those of the slots
        in use, and all.
      attend: (layer, queries, spec, rotate) -> (Partial, Observation), see
        `kvjax.attention.attend`. `rotate(keys)` applies rotary positions that the
        stored keys lack; None if they have theirs.
      check: codec -> None; raises UserError for a codec that does not fit.
      write_attend: None, or (layer, queries, k, v, slots, spec) -> None where it
        cannot, or (layer, Partial, Observation): `write` and `attend` at once.
      encode: (layer, codec) -> layer, the same pairs in the same slots, stored by
        another codec; None where the layout knows no codecs.
      write_keys: (layer, k, slots, positions) -> layer, the half of `write` that the
        selection of values needs.
      exchange_values: (layer, v [B, K, T, D], slots, positions, wanted [B, K, N]) ->
        (layer, [B, K, N, D]), the other half, and the values of the slots `wanted`,
        decoded, on the device. `write_keys` and `exchange_values` are None where a
        layout cannot keep values in host memory (`TensorCodec.on_host`).
    """

    name: str
    init: Callable[..., PyTree]
    positions: Callable[[PyTree], Int[Array, "B K C"]]
    keys: Callable[[PyTree], Array]
    values: Callable[[PyTree], Array]
    claim: Callable[..., tuple]
    write: Callable[..., PyTree]
    evict: Callable[..., PyTree]
    compact: Callable[..., tuple[PyTree, PyTree]]
    rows: Callable[[PyTree, Int[Array, "N"]], PyTree]
    release: Callable[[PyTree, Int[Array, "N"]], PyTree]
    insert: Callable[[PyTree, PyTree, Int[Array, "N"]], PyTree]
    partition: Callable[[PyTree], PyTree]
    nbytes: Callable[[PyTree], tuple[int, int]]
    attend: Callable[..., tuple]
    check: Callable[..., None]
    write_attend: Callable[..., tuple | None] | None = None
    encode: Callable[..., PyTree] | None = None
    write_keys: Callable[..., PyTree] | None = None
    exchange_values: Callable[..., tuple] | None = None

    def __repr__(self) -> str:
        return f"Layout({self.name!r})"

    def capacity(self, layer: PyTree) -> int:
        """Returns C, the slots per head."""
        return jax.eval_shape(self.positions, layer).shape[2]

    def live(self, layer: PyTree) -> Int[Array, "B K"]:
        """Returns the number of pairs that each head holds."""
        return jnp.sum(self.positions(layer) >= 0, axis=-1, dtype=jnp.int32)


def select_rows(layer: PyTree, chosen: Int[Array, "N"]) -> PyTree:
    """`Layout.rows` for layers whose arrays all lead with rows."""
    return jax.tree.map(lambda leaf: host.rows(leaf, chosen), layer)


def insert_rows(layer: PyTree, other: PyTree, rows: Int[Array, "N"]) -> PyTree:
    """`Layout.insert` for layers whose arrays all lead with rows."""
    return jax.tree.map(lambda mine, new: host.insert(mine, new, rows), layer, other)


def partition_rows(layer: PyTree) -> PyTree:
    """`Layout.partition` for layers whose arrays all lead with rows and KV heads."""
    return jax.tree.map(lambda leaf: PartitionSpec(axes.DATA, axes.HEADS), layer)


def live_bytes(positions: Int[Array, "B K C"], stored: PyTree) -> tuple[int, int]:
    """`Layout.nbytes` of the arrays that hold keys and values, in equal shares."""
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(stored))
    live = int(jnp.sum(positions >= 0)) * allocated // positions.size
    return live, allocated


def put(
    leaf: Shaped[Array, "B K C ..."], slots: Int[Array, "B K T"], new: Array
) -> Shaped[Array, "B K C ..."]:
    """Writes `new` into the slots; slots of C or more are dropped."""
    shape = *slots.shape, *leaf.shape[3:]
    new = jnp.broadcast_to(new, shape).astype(leaf.dtype)
    if host.is_host(leaf):
        return host.put(leaf, slots, new)
    return jax.lax.platform_dependent(
        leaf, slots, new, cpu=_put_on_cpu, default=_scatter
    )


def _scatter(leaf, slots, new):
    rows = jnp.arange(leaf.shape[0])[:, None, None]
    columns = jnp.arange(leaf.shape[1])[None, :, None]
    return leaf.at[rows, columns, slots].set(new, mode="drop", unique_indices=True)


def _put_on_cpu(leaf, slots, new):
    """XLA's CPU backend scatters short floats by widening the whole leaf and back."""
    if not host.is_short(leaf):
        return _scatter(leaf, slots, new)
    if slots.shape[2] == 1:
        return mark(leaf, slots, new)
    unsigned = f"uint{8 * leaf.dtype.itemsize}"
    bits = lambda x: jax.lax.bitcast_convert_type(x, unsigned)
    put = _scatter(bits(leaf), slots, bits(new))
    return jax.lax.bitcast_convert_type(put, leaf.dtype)


def mark(
    leaf: Shaped[Array, "B K C ..."], slot: Int[Array, "B K 1"], new: Array
) -> Shaped[Array, "B K C ..."]:
    """`put` for one slot of small leaves: on TPU a select is faster than a scatter."""
    here = jnp.arange(leaf.shape[2], dtype=jnp.int32)[None, None] == slot
    return jnp.where(here.reshape(here.shape + (1,) * (leaf.ndim - 3)), new, leaf)


def first_of(where: Bool[Array, "*axes C"], count: int) -> Int[Array, "*axes N"]:
    """Returns the first `count` indices where it is True, C where there are fewer."""
    size = where.shape[-1]
    if count == 1:
        first = jnp.argmax(where, axis=-1, keepdims=True).astype(jnp.int32)
        return jnp.where(jnp.any(where, axis=-1, keepdims=True), first, size)
    running = jnp.cumsum(where, axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, count + 1, dtype=jnp.int32)
    find = functools.partial(jnp.searchsorted, v=wanted, method="scan_unrolled")
    for _ in range(where.ndim - 1):
        find = jax.vmap(find)
    return find(running).astype(jnp.int32)
