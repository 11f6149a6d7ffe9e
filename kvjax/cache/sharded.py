"""One model on many devices: its KV state and every step, split.

The mesh is one of `kvjax.models.placement`. Every device holds the pairs of its own rows and
heads only, from the moment they are config; policies score and evict them there, and what
they do is what one device would do. The compiler splits the model's matrix products by
the weights' shardings; the KV cache is handed to each shard as it is (`jax.shard_map`),
so that no compiler can decide to gather it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from kvjax import cache
from kvjax.cache.config import CacheConfig
from kvjax.parallel import axes
from kvjax.types import LayerOps, ModelSpec, PyTree


def state_partitions(
    spec: ModelSpec,
    config: CacheConfig,
    capacity: tuple[int, ...],
    over: Mesh | jax.sharding.AbstractMesh,
) -> PyTree:
    """How a `KVState` is split: a pytree of `NamedSharding`."""
    return jax.tree.map(
        lambda part: NamedSharding(over, part), state_specs(spec, config, capacity)
    )


@functools.lru_cache(maxsize=256)
def state_specs(
    spec: ModelSpec, config: CacheConfig, capacity: tuple[int, ...]
) -> PyTree:
    """Which axis of every leaf of a `KVState` is rows and which is heads.

    Found by making the state of more rows, and of more heads, and seeing which axes
    grow: a policy's statistics and a codec's arrays may be laid out as they like.
    """

    def shapes(batch: int, more: int):
        wider = dataclasses.replace(
            spec,
            num_heads=more * spec.num_heads,
            num_kv_heads=more * spec.num_kv_heads,
        )
        init = functools.partial(cache.init, wider, config, batch, capacity)
        return jax.eval_shape(init)

    def axis(size, rows, heads):
        if size != rows:
            return axes.DATA
        return axes.HEADS if size != heads else None

    def leaf(plain, rows, heads):
        sizes = zip(plain.shape, rows.shape, heads.shape, strict=True)
        return PartitionSpec(*(axis(*each) for each in sizes))

    return jax.tree.map(leaf, shapes(2, 1), shapes(4, 1), shapes(2, 2))


def step_layer(
    spec: ModelSpec,
    index: int,
    q: Array,
    k: Array,
    v: Array,
    ops: LayerOps,
    state: cache.KVState,
    *,
    config: CacheConfig,
    n: Array,
    tokens: Array | None = None,
    prompt: bool,
) -> tuple[Array, cache.KVState]:
    """`cache.step_layer`, by every shard for its own rows and heads."""
    options = {"n": n, "tokens": tokens}
    if axes.mesh() is None:
        step = functools.partial(cache.step_layer, config=config, prompt=prompt)
        return step(index, q, k, v, ops, state, **options)
    part, alone = _layer_of(state, config, index)
    heads, rows = PartitionSpec(axes.DATA, axes.HEADS), PartitionSpec(axes.DATA)
    specs = _specs(spec, alone, part)

    def body(q, k, v, rotate, project, part, options):
        own = LayerOps(rotate, project, ops.scoring)
        step = functools.partial(cache.step_layer, config=alone, prompt=prompt)
        return step(0, q, k, v, own, part, **options)

    lent = rows, PartitionSpec(axes.HEADS)  # of rotate and project
    step = axes.per_shard(
        body, (heads, heads, heads, *lent, specs, rows), (heads, specs)
    )
    out, part = step(q, k, v, ops.apply_rope, ops.value_contribution, part, options)
    return out, _put_back(state, part, index)


def compact(
    spec: ModelSpec,
    state: cache.KVState,
    config: CacheConfig,
    capacity: tuple[int, ...],
    rotates: Sequence[Callable[..., Array]],
) -> cache.KVState:
    """`cache.compact`, by every shard for its own rows and heads."""
    shrink = functools.partial(
        cache.compact, config=config, capacity=capacity, rotates=rotates
    )
    if axes.mesh() is None:
        return shrink(state)
    before = _specs(spec, config, state)
    after = state_specs(spec, config, capacity)
    return axes.per_shard(shrink, (before,), after)(state)


def _layer_of(
    state: cache.KVState, config: CacheConfig, index: int
) -> tuple[cache.KVState, CacheConfig]:
    """One layer's part of the state, as the state of a model with that layer alone."""
    layers, stats = (state.layers[index],), (state.stats[index],)
    budget = config.budget and config.budget[index : index + 1]
    alone = dataclasses.replace(config, budget=budget)
    return state.replace(layers=layers, stats=stats), alone


def _put_back(state: cache.KVState, part: cache.KVState, index: int) -> cache.KVState:
    layers, stats = list(state.layers), list(state.stats)
    layers[index], stats[index] = part.layers[0], part.stats[0]
    return state.replace(layers=tuple(layers), stats=tuple(stats), error=part.error)


def _specs(spec: ModelSpec, config: CacheConfig, state: cache.KVState) -> PyTree:
    capacity = tuple(layer.positions.shape[2] for layer in state.layers)
    return state_specs(spec, config, capacity)
