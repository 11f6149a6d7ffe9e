"""A layout whose keys and values lie in one pool that all rows and heads share.

Slot c of a head lies at table[b, k, c] of the pool, in an order drawn at random: code
outside of the layout that indexes its arrays by row finds another row's pairs.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.cache import codecs, layouts
from kvjax.cache.layouts import dense
from kvjax.types import EMPTY, Struct


class PooledLayer(Struct):
    """One layer's pairs.

    Attributes:
      k, v: [P, D] of P = B K C slots.
      table: i32[B, K, C], where each slot lies in the pool.
      positions: i32[B, K, C].
    """

    k: Array
    v: Array
    table: Array
    positions: Array


def _table(shape):
    order = np.random.default_rng(0).permutation(int(np.prod(shape)))
    return jnp.asarray(order.reshape(shape), jnp.int32)


def _init(spec, batch, capacity, codec, dtype):
    table = _table((batch, spec.num_kv_heads, capacity))
    pool = lambda: jnp.zeros((table.size, spec.head_dim), dtype)
    return PooledLayer(pool(), pool(), table, jnp.full(table.shape, EMPTY, jnp.int32))


def _keys(layer):
    return layer.k[layer.table]


def _values(layer):
    return layer.v[layer.table]


def _as_dense(layer):
    dtype = layer.k.dtype.name
    pairs = _keys(layer), _values(layer), layer.positions
    return dense.DenseLayer(*pairs, None, codecs.identity, dtype)


def _claim(layer, per_slot, positions, n):
    claimed, *rest = dense.claim(_as_dense(layer), per_slot, positions, n)
    return layer.replace(positions=claimed.positions), *rest


def _write(layer, k, v, slots, positions):
    beyond = slots >= layer.table.shape[2]
    at = jnp.take_along_axis(layer.table, jnp.where(beyond, 0, slots), axis=2)
    at = jnp.where(beyond, len(layer.k), at)
    put = lambda pool, new: pool.at[at].set(new.astype(pool.dtype), mode="drop")
    return layer.replace(k=put(layer.k, k), v=put(layer.v, v))


def _evict(layer, mask):
    return layer.replace(positions=jnp.where(mask, EMPTY, layer.positions))


def _compact(layer, per_slot, capacity):
    tidy, per_slot = dense.compact(_as_dense(layer), per_slot, capacity)
    table = _table(tidy.positions.shape)
    pool = lambda x: jnp.zeros((table.size, x.shape[3]), x.dtype).at[table].set(x)
    return PooledLayer(pool(tidy.k), pool(tidy.v), table, tidy.positions), per_slot


def _rows(layer, chosen):
    """The pool is shared: the chosen rows are a view of it."""
    return layer.replace(table=layer.table[chosen], positions=layer.positions[chosen])


def _release(layer, rows):
    empty = layer.positions.at[rows].set(EMPTY, mode="drop")
    return layer.replace(positions=empty)


def _insert(layer, other, rows):
    at = layer.table.at[rows].get(mode="fill", fill_value=len(layer.k))
    put = lambda pool, new: pool.at[at].set(new, mode="drop")
    return layer.replace(
        k=put(layer.k, _keys(other)),
        v=put(layer.v, _values(other)),
        positions=layer.positions.at[rows].set(other.positions, mode="drop"),
    )


def _partition(layer):
    raise NotImplementedError("a pool over all rows and heads lies on one device")


def _attend(layer, queries, spec, rotate=None):
    return dense.attend(_as_dense(layer), queries, spec, rotate)


def _only_identity(codec):
    assert codec is codecs.identity


POOLED = layouts.Layout(
    name="pooled",
    init=_init,
    positions=lambda layer: layer.positions,
    keys=_keys,
    values=_values,
    claim=_claim,
    write=_write,
    evict=_evict,
    compact=_compact,
    rows=_rows,
    release=_release,
    insert=_insert,
    partition=_partition,
    nbytes=lambda layer: layouts.live_bytes(layer.positions, (layer.k, layer.v)),
    attend=_attend,
    check=_only_identity,
)


def spoiled(layer: PooledLayer) -> PooledLayer:
    """The layer with junk in every empty slot."""
    at = jnp.where(layer.positions < 0, layer.table, len(layer.k))
    junk = lambda pool: pool.at[at].set(77, mode="drop")
    return layer.replace(k=junk(layer.k), v=junk(layer.v))
