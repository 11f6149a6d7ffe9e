"""The KV state and its transitions on a mesh of devices, see `kvjax.parallel.meshes`.

Every device holds the pairs of its own rows and heads only, from the moment they are
made. Policies score and evict them there, with the result that one device would have.
The compiler splits the model's matrix products by the weights' shardings; the KV cache
goes through `jax.shard_map`, so that no compiler can decide to gather it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from kvjax.cache import eviction, update
from kvjax.cache import prefix as prefixes
from kvjax.cache.prefix import Prefix
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import KVState, capacities, init
from kvjax.parallel import axes, host
from kvjax.types import LayerOps, ModelSpec, PyTree


def state_partitions(
    spec: ModelSpec,
    config: CacheSpec,
    capacity: tuple[int, ...],
    over: Mesh | jax.sharding.AbstractMesh,
) -> PyTree:
    """Returns the sharding of every array of a `KVState`, with its memory."""
    made = host.like(functools.partial(init, spec, config, 1, capacity))
    return jax.tree.map(
        lambda split, leaf: host.beside(leaf, NamedSharding(over, split)),
        state_specs(spec, config, capacity),
        made,
    )


@functools.lru_cache(maxsize=256)
def state_specs(
    spec: ModelSpec, config: CacheSpec, capacity: tuple[int, ...]
) -> PyTree:
    """Returns the mesh axes of every array of a `KVState`, as `PartitionSpec`s.

    The layout knows those of its layers. Statistics lead with rows; the axis of heads
    is the one that grows with the number of heads, as policies may put it anywhere.
    """
    rows, heads = PartitionSpec(axes.DATA), PartitionSpec(axes.DATA, axes.HEADS)
    once, twice = (_shapes(spec, config, capacity, times) for times in (1, 2))

    def of_stats(leaf, wider):
        grows = [a != b for a, b in zip(leaf.shape[1:], wider.shape[1:], strict=True)]
        return PartitionSpec(axes.DATA, *(axes.HEADS if g else None for g in grows))

    return once.replace(
        layers=tuple(map(once.layout.partition, once.layers)),
        stats=jax.tree.map(of_stats, once.stats, twice.stats),
        next_pos=rows,
        error=heads,
        measured=None if once.measured is None else rows,
    )


def _shapes(
    spec: ModelSpec, config: CacheSpec, capacity: tuple[int, ...], times: int
) -> KVState:
    """Returns the shapes of one row's state, of a model with `times` the heads."""
    wider = dataclasses.replace(
        spec,
        num_heads=times * spec.num_heads,
        num_kv_heads=times * spec.num_kv_heads,
    )
    sizes = config.budget and tuple(
        size if isinstance(size, int) else times * size for size in config.budget
    )
    config = dataclasses.replace(config, budget=sizes)
    return jax.eval_shape(functools.partial(init, wider, config, 1, capacity))


def step_layer(
    spec: ModelSpec,
    index: int,
    q: Array,
    k: Array,
    v: Array,
    ops: LayerOps,
    state: KVState,
    *,
    config: CacheSpec,
    n: Array,
    tokens: Array | None = None,
    is_prefill: bool,
    policy_params: PyTree = None,
    has_evicted: bool = False,
    prefix: Prefix | None = None,
) -> tuple[Array, KVState]:
    """`update.step_layer` on every shard, for its own rows and heads.

    A learned policy's weights are whole on every shard, which selects its heads'.

    Raises:
      UserError: the prefix does not fit the rows, see `kvjax.cache.prefix`.
    """
    if prefix is not None:
        prefixes.check(prefix.config, config)
        prefixes.check_groups(prefix, q.shape[0])
    if axes.mesh() is None:
        return update.step_layer(
            index,
            q,
            k,
            v,
            ops,
            state,
            config=config,
            n=n,
            tokens=tokens,
            is_prefill=is_prefill,
            policy_params=policy_params,
            has_evicted=has_evicted,
            prefix=prefix,
        )
    part, alone = state.of_layer(index), config.of_layer(index)
    rows, heads = PartitionSpec(axes.DATA), PartitionSpec(axes.DATA, axes.HEADS)
    specs = _specs(dataclasses.replace(spec, num_layers=1), alone, part)
    hidden = ops.hidden if "hidden" in config.required_stats(is_prefill) else None
    by_row = {"n": n, "tokens": tokens, "hidden": hidden}
    functions = ops.apply_rope, ops.value_contribution
    function_specs = rows, PartitionSpec(axes.HEADS)
    prefix = prefix and prefix.of_layer(index)
    prefix_specs = prefix and prefixes.partitions(prefix)

    def body(qkv, functions, part, policy_params, by_row, prefix):
        own = LayerOps(*functions, ops.scoring, by_row["hidden"])
        return update.step_layer(
            0,
            *qkv,
            own,
            part,
            config=alone,
            n=by_row["n"],
            tokens=by_row["tokens"],
            is_prefill=is_prefill,
            policy_params=policy_params,
            layer_number=index,
            has_evicted=has_evicted,
            prefix=prefix,
        )

    in_specs = heads, function_specs, specs, PartitionSpec(), rows, prefix_specs
    step = axes.per_shard(body, in_specs, (heads, specs))
    out, part = step((q, k, v), functions, part, policy_params, by_row, prefix)
    return out, _with_layer(state, part, index)


def evict_overflow(
    spec: ModelSpec,
    state: KVState,
    tokens: int,
    apply_ropes: Sequence[Callable[..., Array]],
    *,
    config: CacheSpec,
    n: Array,
    is_prefill: bool,
    policy_params: Sequence[PyTree] | None = None,
) -> KVState:
    """`eviction.evict_overflow` in all layers, on every shard."""

    def evict(state, policy_params, n):
        inputs = {
            index: eviction.PolicyInputs(
                apply_ropes[index],
                spec.scoring(index),
                policy_params and policy_params[index],
                index,
            )
            for index in range(spec.num_layers)
        }
        return eviction.evict_overflow(
            state, inputs, tokens, config=config, n=n, is_prefill=is_prefill
        )

    if axes.mesh() is None or not config.schedule.evicts(is_prefill):
        return evict(state, policy_params, n)
    specs = _specs(spec, config, state)
    in_specs = specs, PartitionSpec(), PartitionSpec(axes.DATA)
    return axes.per_shard(evict, in_specs, specs)(state, policy_params, n)


def compact(
    spec: ModelSpec,
    state: KVState,
    config: CacheSpec,
    capacity: tuple[int, ...],
    apply_ropes: Sequence[Callable[..., Array]],
    policy_params: Sequence[PyTree] | None = None,
) -> KVState:
    """`eviction.compact` on every shard."""

    def shrink(state, policy_params):
        return eviction.compact(
            state,
            config,
            capacity,
            apply_ropes,
            policy_params,
            scorings=[spec.scoring(index) for index in range(spec.num_layers)],
        )

    if axes.mesh() is None:
        return shrink(state, policy_params)
    before, after = _specs(spec, config, state), state_specs(spec, config, capacity)
    in_specs = before, PartitionSpec()
    return axes.per_shard(shrink, in_specs, after)(state, policy_params)


def _with_layer(state: KVState, part: KVState, index: int) -> KVState:
    """Returns the state with layer `index` replaced by the only one of `part`."""
    layers, stats = list(state.layers), list(state.stats)
    for i, (place, _) in enumerate(state.head_groups(index)):
        layers[place], stats[place] = part.layers[i], part.stats[i]
    return state.replace(layers=tuple(layers), stats=tuple(stats), error=part.error)


def _specs(spec: ModelSpec, config: CacheSpec, state: KVState) -> PyTree:
    return state_specs(spec, config, capacities(state))
