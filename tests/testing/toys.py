"""A layout, codecs and a budget rule of users' own, for tests of extension points."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax import attention
from kvjax.cache import budgets, codecs, layouts
from kvjax.cache.layouts import dense
from kvjax.cache.layouts.base import put
from kvjax.types import EMPTY, Struct
from testing import pooled

ROUNDED = codecs.TensorCodec(
    name="bfloat16",
    init=lambda shape, dtype: jnp.zeros(shape, jnp.bfloat16),
    encode=lambda x: x.astype(jnp.bfloat16),
    decode=lambda stored, dtype: stored.astype(dtype),
)
HALVED = codecs.Codec("halved", ROUNDED, ROUNDED)
HALVED_BUT_ENDS = HALVED._replace(name="halved_but_ends", residual_length=6, sinks=3)
OF_8_CHANNELS = {  # the package's, for heads as small as those of the tests
    "int8": codecs.int8(),
    "int4": codecs.int4(8),
    "int4_centred": codecs.int4(4, symmetric=False),
    "int4_outliers": codecs.int4_outliers(1, 8),
    "int4_rotated": codecs.int4_rotated(8),
    "int2": codecs.int2(8),
    "int2_rotated": codecs.int2_rotated(8),
    "fp8": codecs.fp8(),
    "k8v4": codecs.k8v4(8),
    "k8v4_but_ends": codecs.pair("int8", codecs.int4(8), residual_length=6, sinks=2),
}


class HalvesLayer(Struct):
    """Slots in two arrays of each kind: the first third of them, and the others."""

    k: tuple[Array, Array]
    v: tuple[Array, Array]
    positions: tuple[Array, Array]


def _split(x):
    return tuple(jnp.split(x, [x.shape[2] // 3], axis=2))


def _whole(parts):
    return jnp.concatenate(parts, axis=2)


def _init(spec, batch, capacity, codec, dtype):
    shape = (batch, spec.num_kv_heads, capacity, spec.head_dim)
    empty = jnp.full(shape[:3], EMPTY, jnp.int32)
    zeros = lambda: _split(jnp.zeros(shape, dtype))
    return HalvesLayer(zeros(), zeros(), _split(empty))


def _like_dense(layer):
    whole = (_whole(parts) for parts in (layer.k, layer.v, layer.positions))
    return dense.DenseLayer(*whole, None, codecs.identity, layer.k[0].dtype.name)


def _claim(layer, per_slot, positions, n):
    found = dense.claim(_like_dense(layer), per_slot, positions, n)
    return layer.replace(positions=_split(found[0].positions)), *found[1:]


def _write(layer, k, v, slots, positions):
    size = layer.k[0].shape[2]
    beyond = jnp.int32(1 << 20)
    places = (
        jnp.where(slots < size, slots, beyond),
        jnp.where(slots >= size, slots - size, beyond),
    )
    both = lambda parts, new: tuple(map(put, parts, places, (new, new)))
    return layer.replace(k=both(layer.k, k), v=both(layer.v, v))


def _evict(layer, mask):
    old = zip(layer.positions, _split(mask), strict=True)
    return layer.replace(positions=tuple(jnp.where(m, EMPTY, p) for p, m in old))


def _release(layer, rows):
    empty = lambda positions: positions.at[rows].set(EMPTY, mode="drop")
    return layer.replace(positions=tuple(map(empty, layer.positions)))


def _compact(layer, per_slot, capacity):
    tidy, per_slot = dense.compact(_like_dense(layer), per_slot, capacity)
    parts = map(_split, (tidy.k, tidy.v, tidy.positions))
    return HalvesLayer(*parts), per_slot


def _attend(layer, queries, spec, rotate=None):
    keys = _split(rotate(_whole(layer.k))) if rotate else layer.k
    segments = list(map(attention.Pairs, keys, layer.v, layer.positions))
    partial, seen = attention.attend_segments(queries, segments, spec)
    both = {
        name: jnp.concatenate([getattr(part, name) for part in seen], axis=-1)
        for name in spec.stats
        if getattr(seen[0], name, None) is not None
        and name.startswith(("attn", "last"))
    }
    return partial, seen[0]._replace(**both)


def _only_identity(codec):
    assert codec is codecs.identity


HALVES = layouts.Layout(
    name="halves",
    init=_init,
    positions=lambda layer: _whole(layer.positions),
    keys=lambda layer: _whole(layer.k),
    values=lambda layer: _whole(layer.v),
    claim=_claim,
    write=_write,
    evict=_evict,
    compact=_compact,
    rows=layouts.select_rows,
    release=_release,
    insert=layouts.insert_rows,
    partition=layouts.partition_rows,
    nbytes=lambda layer: layouts.live_bytes(
        _whole(layer.positions), (layer.k, layer.v)
    ),
    attend=_attend,
    check=_only_identity,
)


def spoiled(state):
    """The state with junk in every empty slot, statistics included."""

    def fill(positions, leaf):
        mask = (positions < 0).reshape(positions.shape + (1,) * (leaf.ndim - 3))
        return jnp.where(mask, jnp.ones((), leaf.dtype) * 77, leaf)

    def filled(positions, stored):
        return jax.tree.map(functools.partial(fill, positions), stored)

    def layer(held):  # of some layouts, positions and pairs lie in several arrays
        if isinstance(held, pooled.PooledLayer):
            return pooled.spoiled(held)
        junk = functools.partial(jax.tree.map, filled, held.positions)
        return held.replace(k=junk(held.k), v=junk(held.v))

    def stat(stats, held):
        junk = functools.partial(fill, state.layout.positions(held))
        return stats._replace(per_slot=jax.tree.map(junk, stats.per_slot))

    pairs = zip(state.stats, state.layers, strict=True)
    return state.replace(
        layers=tuple(map(layer, state.layers)),
        stats=tuple(stat(stats, held) for stats, held in pairs),
    )


@functools.cache
def loudest_layers(share: float = 0.5) -> budgets.BudgetRule:
    """Layers whose attention turns the stream most get `share` more, the rest less."""

    def measure(before, after):
        norm = lambda x: jnp.linalg.norm(x, axis=-1)
        product = jnp.sum(before * after, axis=-1)
        return product / jnp.maximum(norm(before) * norm(after), 1e-9)

    def reallocate(measured, mean):
        more = int(share * mean)
        order = np.argsort(measured)  # the smallest cosine turns most
        sizes = np.full(len(measured), mean)
        half = len(measured) // 2
        sizes[order[:half]] += more
        sizes[order[len(measured) - half :]] -= more
        return sizes.tolist()

    return budgets.BudgetRule(
        "loudest_layers",
        lambda spec, mean: (mean,) * spec.num_layers,
        measure,
        reallocate,
    )
