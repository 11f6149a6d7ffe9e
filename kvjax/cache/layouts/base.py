"""What a layout is: where pairs lie, and how they are found, written and moved.

A layer of pairs is a pytree of the layout's own, whose arrays lead with B rows and, if
they belong to heads, with K heads next: over a mesh they are split along these axes.
Whatever the arrays are, a layer shows itself as C slots per head, in an order of its
own that only `write`, `evict` and `compact` change; a policy's statistics
[B, K, C, ...] follow that order.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kvjax.parallel import host
from kvjax.types import PyTree


class Layout(NamedTuple):
    """Pure functions of a layer.

    Attributes:
      name: as in the registry, for reports.
      init: (spec, batch, capacity, codec, dtype) -> an empty layer.
      positions: layer -> i32[B, K, C], the true position of each pair; -1 if empty.
      keys, values: layer -> [B, K, C, D], decoded, as they were written.
      claim: (layer, per_slot, positions [B, T], n [B]) -> (layer, per_slot, slots
        [B, K, T], overflow [B, K]). Gives the first n of T new pairs of every row an
        empty slot each (C for none), marks it with its position and zeroes its
        statistics; says where some pair found none.
      write: (layer, k, v [B, K, T, D], slots, positions [B, T]) -> layer, with the
        pairs in the slots claimed for them.
      evict: (layer, mask [B, K, C]) -> layer, the slots in the mask empty.
      compact: (layer, per_slot, capacity) -> (layer, per_slot) of `capacity` slots, the
        live pairs in the order of their positions in the first of them.
      insert: (layer, other, row) -> layer, the rows of `other` in the place of its own
        from `row` on.
      attend: (layer, q, positions [B, T], n, stats, implementation, scoring, turned)
        -> (Partial, Observation), see `kvjax.attention.attend`; `turned(keys)` is what
        attention reads of the keys, unless `turned` is None.
      write_attend: None, or (layer, q, k, v, slots, positions, n, stats,
        implementation, scoring) -> None where it cannot, or (layer, Partial,
        Observation): `write` and `attend` at once.
      stored: layer -> the arrays that hold keys and values, for counting bytes.
      check: codec -> None; raises UserError for a codec that does not fit.
      encode: (layer, codec) -> layer, the same pairs in the same slots, stored by
        another codec; None where all are stored as they are.
      write_keys: (layer, k, slots, positions) -> layer, the half of `write` that the
        choice of values needs.
      exchange_values: (layer, v [B, K, T, D], slots, positions, wanted [B, K, N]) ->
        (layer, [B, K, N, D]), the other half, and with it the values of the slots
        wanted, decoded, on the device. Both are None where a layout cannot keep values
        in host memory, as their codec says (`TensorCodec.on_host`).
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
    insert: Callable[..., PyTree]
    attend: Callable[..., tuple]
    write_attend: Callable[..., tuple | None] | None
    stored: Callable[[PyTree], PyTree]
    check: Callable[..., None]
    encode: Callable[..., PyTree] | None = None
    write_keys: Callable[..., PyTree] | None = None
    exchange_values: Callable[..., tuple] | None = None

    def __repr__(self) -> str:
        return f"Layout({self.name!r})"

    def capacity(self, layer: PyTree) -> int:
        """C, slots per head."""
        return jax.eval_shape(self.positions, layer).shape[2]

    def live(self, layer: PyTree) -> Int[Array, "B K"]:
        """How many pairs each head holds."""
        return jnp.sum(self.positions(layer) >= 0, axis=-1, dtype=jnp.int32)


def insert_rows(layer: PyTree, other: PyTree, row: Int[Array, ""]) -> PyTree:
    """Writes the rows of `other` over those of `layer` from `row` on."""
    return jax.tree.map(lambda mine, new: host.insert(mine, new, row), layer, other)


def put(
    leaf: Shaped[Array, "B K C ..."], slots: Int[Array, "B K T"], new: Array
) -> Shaped[Array, "B K C ..."]:
    """Puts `new` into slots; those of C or more are not written."""
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
    """`put` for one slot of small leaves; on TPU a scatter is slow, a select not."""
    here = jnp.arange(leaf.shape[2], dtype=jnp.int32)[None, None] == slot
    return jnp.where(here.reshape(here.shape + (1,) * (leaf.ndim - 3)), new, leaf)


def first_of(where: Bool[Array, "*axes C"], count: int) -> Int[Array, "*axes N"]:
    """The first `count` places where it is True, C where there are fewer."""
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
