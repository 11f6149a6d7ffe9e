"""One model on many devices: its weights, its KV state and every step, split.

A mesh is asked for as `data:2,model:4`: rows of the batch are split in two, the model
in four. Every device holds the pairs of its own rows and heads only, from the moment
they are made; policies score and evict them there, and what they do is what one device
would do. The compiler splits the model's matrix products by the weights' shardings
(`kvjax.models.decoder.param_partitions`); the KV cache is handed to each shard as it is
(`jax.shard_map`), so that no compiler can decide to gather it.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from kvjax import axes, cache
from kvjax.models import decoder
from kvjax.types import LayerOps, ModelSpec, PyTree, UserError

_ASKED = re.compile(r"(data|model):(\d+)")


def mesh(
    asked: str, spec: ModelSpec, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """The mesh that was asked for, its axes those of `kvjax.axes`.

    Where the KV heads do not divide over the devices of a model, they are split over as
    many of them as they do, and the same on the others.

    Args:
      asked: `data:R,model:N`, either or both; one that is left out is 1.
      spec: the model's shape.
      devices: to use; None for all of `jax.devices()`, of all processes.

    Raises:
      UserError: a text that is not of this form, or another number of devices.
    """
    devices = jax.devices() if devices is None else devices
    rows, model = _sizes(asked)
    if rows * model != len(devices):
        raise UserError(
            f"mesh {asked!r} is of {rows * model} devices, and there are "
            f"{len(devices)}: change the numbers"
        )
    heads = math.gcd(spec.num_kv_heads, model)
    shape = (rows, heads, model // heads)
    names = (axes.DATA, axes.HEADS, axes.COPIES)
    auto = (AxisType.Auto,) * len(names)
    return jax.make_mesh(shape, names, axis_types=auto, devices=devices)


def notice(over: Mesh, spec: ModelSpec) -> str | None:
    """What is not split, in one line; None where all is."""
    whole = []
    copies = over.shape[axes.COPIES]
    if copies > 1:
        whole.append(
            f"{spec.num_kv_heads} KV heads are split {over.shape[axes.HEADS]} ways "
            f"and each is on {copies} devices"
        )
    model = axes.ways(over, axes.MODEL)
    for what, size in (("feed-forward", spec.ff_dim), ("vocabulary", spec.vocab_size)):
        if size % model:
            whole.append(f"the {what} of {size} does not divide by {model}")
    return f"{spec.name}: " + "; ".join(whole) if whole else None


def use(over: Mesh | None) -> contextlib.AbstractContextManager:
    """Within it, programs are traced, and run, over the mesh; None is one device."""
    return jax.set_mesh(over) if over else contextlib.nullcontext()


def of(params: PyTree) -> Mesh | None:
    """The mesh that params are split over, None where they are on one device."""
    found = getattr(params["embed"].sharding, "mesh", None)
    return found if found is not None and axes.HEADS in found.axis_names else None


def fitted(spec: ModelSpec, over: Mesh | None) -> ModelSpec:
    """The spec of params that are split over the mesh; see `ModelSpec.ff_groups`."""
    ways = axes.ways(over, axes.MODEL) if over else 1
    groups = 1 if spec.ff_dim % ways else ways
    return dataclasses.replace(spec, ff_groups=groups)


def place(spec: ModelSpec, over: Mesh, path: tuple, weight: np.ndarray) -> jax.Array:
    """One weight, in the layout of a single device, split over the mesh.

    Args:
      spec: of the split params, see `fitted`.
      over: the mesh.
      path: keys and indices that lead to the weight in the params.
      weight: the whole of it, on the host. Every device gets its own part only.
    """
    sharding = functools.reduce(
        lambda node, key: node[key], path, decoder.param_partitions(spec, over)
    )
    if str(path[-1]).startswith("gate_up"):
        weight = _grouped(weight, spec.ff_groups)
    return jax.make_array_from_callback(weight.shape, sharding, weight.__getitem__)


def split(spec: ModelSpec, params: PyTree, over: Mesh) -> PyTree:
    """Params that are whole on one device, split over the mesh."""
    fit = fitted(spec, over)
    plain = lambda key: getattr(key, "key", getattr(key, "idx", None))
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: place(fit, over, tuple(map(plain, path)), np.asarray(leaf)),
        params,
    )


def by_row(over: Mesh | None, *arrays: Array) -> list[jax.Array]:
    """Arrays whose first axis is rows, each device given its own; None is the default.

    In a run of several processes all of them hold the whole arrays.
    """
    if over is None:
        return [jnp.asarray(x) for x in arrays]
    split = NamedSharding(over, PartitionSpec(axes.DATA))
    return [jax.device_put(x, split) for x in arrays]


def random_params(
    spec: ModelSpec, over: Mesh, key: Array, dtype: jnp.dtype = jnp.float32
) -> PyTree:
    """`decoder.random_params`, each device drawing its own part."""
    draw = functools.partial(decoder.random_params, fitted(spec, over), dtype=dtype)
    made = jax.jit(draw, out_shardings=decoder.param_partitions(spec, over))
    with use(over):
        return made(key)


def state_partitions(
    spec: ModelSpec,
    made: cache.Compression,
    capacity: tuple[int, ...],
    over: Mesh | jax.sharding.AbstractMesh,
) -> PyTree:
    """How a `KVState` is split: a pytree of `NamedSharding`."""
    return jax.tree.map(
        lambda part: NamedSharding(over, part), state_specs(spec, made, capacity)
    )


@functools.lru_cache(maxsize=256)
def state_specs(
    spec: ModelSpec, made: cache.Compression, capacity: tuple[int, ...]
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
        init = functools.partial(cache.init, wider, made, batch, capacity)
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
    made: cache.Compression,
    n: Array,
    tokens: Array | None = None,
    prompt: bool,
) -> tuple[Array, cache.KVState]:
    """`cache.step_layer`, by every shard for its own rows and heads."""
    options = {"n": n, "tokens": tokens}
    if axes.mesh() is None:
        step = functools.partial(cache.step_layer, made=made, prompt=prompt)
        return step(index, q, k, v, ops, state, **options)
    part, alone = _layer_of(state, made, index)
    heads, rows = PartitionSpec(axes.DATA, axes.HEADS), PartitionSpec(axes.DATA)
    specs = _specs(spec, alone, part)

    def body(q, k, v, rotate, project, part, options):
        own = LayerOps(rotate, project, ops.scoring)
        step = functools.partial(cache.step_layer, made=alone, prompt=prompt)
        return step(0, q, k, v, own, part, **options)

    lent = rows, PartitionSpec(axes.HEADS)  # of rotate and project
    step = axes.per_shard(
        body, (heads, heads, heads, *lent, specs, rows), (heads, specs)
    )
    out, part = step(q, k, v, ops.rotate, ops.project, part, options)
    return out, _put_back(state, part, index)


def compact(
    spec: ModelSpec,
    state: cache.KVState,
    made: cache.Compression,
    capacity: tuple[int, ...],
) -> cache.KVState:
    """`cache.compact`, by every shard for its own rows and heads."""
    shrink = functools.partial(
        cache.compact, made=made, capacity=capacity, rotates=decoder.rotations(spec)
    )
    if axes.mesh() is None:
        return shrink(state)
    before = _specs(spec, made, state)
    after = state_specs(spec, made, capacity)
    return axes.per_shard(shrink, (before,), after)(state)


def _sizes(asked: str) -> tuple[int, int]:
    parts = [_ASKED.fullmatch(part.strip()) for part in asked.split(",")]
    sizes = dict(part.groups() for part in parts if part)
    if not all(parts) or len(sizes) < len(parts) or "0" in sizes.values():
        raise UserError(
            f"mesh {asked!r}: give the devices along each axis as data:2,model:4"
        )
    return int(sizes.get("data", 1)), int(sizes.get("model", 1))


def _grouped(weight: np.ndarray, groups: int) -> np.ndarray:
    """Columns of gate and up, [..., 2 F], brought from one group into several."""
    parts = weight.reshape(*weight.shape[:-1], 2, groups, -1)
    return np.swapaxes(parts, -3, -2).reshape(weight.shape)


def _layer_of(
    state: cache.KVState, made: cache.Compression, index: int
) -> tuple[cache.KVState, cache.Compression]:
    """One layer's part of the state, as the state of a model with that layer alone."""
    layers, stats = (state.layers[index],), (state.stats[index],)
    budget = made.budget and made.budget[index : index + 1]
    alone = dataclasses.replace(made, budget=budget)
    return state.replace(layers=layers, stats=stats), alone


def _put_back(state: cache.KVState, part: cache.KVState, index: int) -> cache.KVState:
    layers, stats = list(state.layers), list(state.stats)
    layers[index], stats[index] = part.layers[0], part.stats[0]
    return state.replace(layers=tuple(layers), stats=tuple(stats), error=part.error)


def _specs(spec: ModelSpec, made: cache.Compression, state: cache.KVState) -> PyTree:
    capacity = tuple(layer.pos.shape[2] for layer in state.layers)
    return state_specs(spec, made, capacity)
