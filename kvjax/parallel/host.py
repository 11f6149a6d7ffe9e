"""Arrays in the host's memory beside the device, and what can be done with them there.

An array knows where it lies: its type names a memory space, inside a program too. These
functions take arrays of either space, so that whoever moves slots need not ask. What
touches some rows of an array on the host is computed by the host's processor, so that
no more than these rows cross the link; where that does not work, the whole array
crosses it and back (`works_by_rows`).

A CPU has both spaces in one memory: nothing is saved there, and everything is the same.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import compute_on as _compute_on
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from kvjax.messages import warn
from kvjax.tracing import run_aside
from kvjax.types import PyTree, UserError

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
KIND = "pinned_host"  # the memory of a device that JAX types as the host's
_BY_ROWS = ("cpu", "tpu")  # elsewhere the compiler dies of a scatter on the host
_AT_ONCE = 8  # tokens of a row; TPU's compiler dies of 32, and of any of 8 bits
# A context manager in JAX 0.10, where its successor already has another name.
_run_on: Callable = getattr(_compute_on, "compute_on2", _compute_on.compute_on)


def is_host(x: Array) -> bool:
    """Returns whether an array is in host memory."""
    return jax.typeof(x).memory_space == _HOST


def is_short(x: Array) -> bool:
    """Returns whether x has floats of at most 16 bits, which XLA's CPU widens."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 2


def to_host(tree: PyTree) -> PyTree:
    """Moves a pytree of arrays to host memory."""
    return jax.tree.map(lambda x: jax.device_put(x, _HOST), tree)


def to_device(tree: PyTree) -> PyTree:
    """Moves a pytree of arrays to device memory."""
    return jax.tree.map(lambda x: jax.device_put(x, _DEVICE) if is_host(x) else x, tree)


def take(
    x: Shaped[Array, "B K C ..."], slots: Int[Array, "B K N"]
) -> Shaped[Array, "B K N ..."]:
    """Gathers slots (below C) of every head, in the memory that holds x."""
    return _by_rows(_take, x, slots)


def put(
    x: Shaped[Array, "B K C ..."],
    slots: Int[Array, "B K T"],
    new: Shaped[Array, "B K T ..."],
) -> Shaped[Array, "B K C ..."]:
    """Returns x with new slots; slots >= C are dropped, none may occur twice."""
    return _by_rows(_put, x, slots, new, writes=slots.shape[2])


def exchange(
    x: Shaped[Array, "B K C ..."],
    slots: Int[Array, "B K T"],
    new: Shaped[Array, "B K T ..."],
    wanted: Int[Array, "B K N"],
) -> tuple[Shaped[Array, "B K C ..."], Shaped[Array, "B K N ..."]]:
    """Does `put`, then `take`, in one computation on the host.

    Arrays pass through the device between two computations on the host: with two, x
    would cross the link and come back.
    """
    return _by_rows(_exchange, x, slots, new, wanted, writes=slots.shape[2])


def insert(
    x: Shaped[Array, "B ..."], part: Shaped[Array, "N ..."], rows: Int[Array, "N"]
) -> Shaped[Array, "B ..."]:
    """Copies each row of `part` into the row of x that `rows` names.

    No row is named twice; rows outside of 0 to B - 1 are dropped.
    """
    if is_host(x) or not is_short(x):
        return _by_rows(_insert, x, rows, part, writes=len(rows))
    given = x, rows, to_device(part)
    return lax.platform_dependent(*given, cpu=_insert_on_cpu, default=_insert)


def rows(x: Shaped[Array, "B ..."], chosen: Int[Array, "*N"]) -> Shaped[Array, "..."]:
    """Returns x[chosen], in the memory that holds x; no index is out of range."""
    if is_host(x) or not is_short(x):
        return _by_rows(_rows, x, chosen)
    return lax.platform_dependent(x, chosen, cpu=_rows_on_cpu, default=_rows)


def like(make: Callable[[], PyTree]) -> PyTree:
    """Returns `jax.eval_shape(make)` with the sharding of arrays in host memory.

    A shape without a sharding counts as the device's, and `jax.eval_shape` has none.
    """
    traced, shapes = jax.make_jaxpr(make, return_shape=True)()
    leaves, structure = jax.tree.flatten(shapes)
    told = lambda x, aval: on_host(x) if aval.memory_space == _HOST else x
    return structure.unflatten(map(told, leaves, traced.out_avals))


def on_host(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array in the default device's host memory."""
    over = jax.sharding.Mesh(jax.devices()[:1], ("one",))
    placed = NamedSharding(over, PartitionSpec(), memory_kind=KIND)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)


def beside(x: jax.ShapeDtypeStruct, split: NamedSharding) -> NamedSharding:
    """Returns the sharding `split` in the memory that holds x, of `like`."""
    there = x.sharding is not None and x.sharding.memory_kind == KIND
    return split.with_memory_kind(KIND) if there else split


def nbytes(tree: PyTree) -> int:
    """Returns bytes per device that arrays, or shapes of `like`, have on the host."""

    def size(leaf: Any) -> int:
        split = getattr(leaf, "sharding", None)
        if split is None or split.memory_kind != KIND:
            return 0
        return math.prod(split.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def is_there() -> bool:
    """Returns whether the default device can address host memory."""
    return KIND in _kinds()


def check() -> None:
    """Raises UserError where the default device cannot address host memory."""
    if not is_there():
        raise UserError(
            f"values cannot lie in host memory: {jax.devices()[0].device_kind} offers "
            f"{', '.join(_kinds())} and no {KIND}; leave offload out"
        )


def _kinds() -> list[str]:
    """Returns the kinds of memory that the default device can address."""
    return [memory.kind for memory in jax.devices()[0].addressable_memories()]


def _by_rows(work: Callable, x: Array, *given: Array, writes: int = 0) -> Any:
    """work(x, *given), computed where x lies; it writes so many tokens of a row."""
    if not is_host(x):
        return work(x, *to_device(given))
    if not can_write(x, writes):
        return to_host(work(*to_device((x, *given))))
    return _on_host(work, x, *given)


def _on_host(work: Callable, *given: Array) -> Any:
    """work(*given), computed by the host's processor."""
    run = _run_on(work, compute_type="device_host", out_memory_spaces=_HOST)
    return run(*to_host(given))


def can_write(x: Array, tokens: int) -> bool:
    """Returns whether the host writes that many tokens per row of x in place."""
    if not works_by_rows():
        return False
    few = tokens <= _AT_ONCE and x.dtype.itemsize > 1
    return few or not tokens or _platform() == "cpu"


def works_by_rows() -> bool:
    """Returns whether the host computes on its arrays; tried once per process."""
    elsewhere = jax.sharding.get_abstract_mesh().abstract_device
    return _platform() in _BY_ROWS and (bool(elsewhere) or _tried())


def _platform() -> str:
    """Returns the platform that the program is compiled for."""
    elsewhere = jax.sharding.get_abstract_mesh().abstract_device
    return elsewhere.platform if elsewhere else jax.default_backend()


@functools.cache
def _tried() -> bool:
    try:
        wrong = run_aside(_wrong)
    except Exception as error:  # whatever a compiler may say
        wrong = f"{type(error).__name__}: {error}".splitlines()[0]
    if wrong:
        warn(
            f"the host does not compute on its own arrays here ({wrong}): whole layers "
            "of values cross the link in both directions, which is slow",
        )
    return not wrong


def _wrong() -> str | None:
    """Returns what is wrong with a small case, or None."""
    x = np.arange(48.0, dtype=np.float32).reshape(1, 2, 4, 6)
    slots, new = np.array([[[2], [0]]], np.int32), np.ones((1, 2, 1, 6), np.float32)

    @jax.jit
    def written_and_read(x, slots, new):
        x = _on_host(_put, x, slots, new)
        return jax.device_put(_on_host(_take, x, slots), _DEVICE)

    found = written_and_read(jax.device_put(x, _HOST), slots, new)
    return None if np.array_equal(found, new) else "a row came back as another"


# With `lax` alone: `jax.numpy` would bring constants that lie on the device.
def _take(x: Array, slots: Array) -> Array:
    rest = x.shape[3:]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(3, x.ndim)),
        collapsed_slice_dims=(2,),
        start_index_map=(2,),
        operand_batching_dims=(0, 1),
        start_indices_batching_dims=(0, 1),
    )
    index = lax.reshape(slots, (*slots.shape, 1))
    inside = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, index, numbers, (1, 1, 1, *rest), mode=inside)


def _put(x: Array, slots: Array, new: Array) -> Array:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(3, x.ndim)),
        inserted_window_dims=(2,),
        scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(0, 1),
        scatter_indices_batching_dims=(0, 1),
    )
    index = lax.reshape(slots, (*slots.shape, 1))
    beyond = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(x, index, new, numbers, unique_indices=True, mode=beyond)


def _exchange(x: Array, slots: Array, new: Array, wanted: Array) -> tuple:
    x = _put(x, slots, new)
    return x, _take(x, wanted)


def _insert(x: Array, rows: Array, part: Array) -> Array:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, x.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    index = lax.reshape(rows, (*rows.shape, 1))
    beyond = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(x, index, part, numbers, unique_indices=True, mode=beyond)


def _insert_on_cpu(x: Array, rows: Array, part: Array) -> Array:
    """XLA's CPU backend scatters short floats by widening all of x: scatter bits."""
    bits = lambda leaf: lax.bitcast_convert_type(leaf, f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(_insert(bits(x), rows, bits(part)), x.dtype)


def _rows_on_cpu(x: Array, chosen: Array) -> Array:
    """XLA's CPU backend widens short floats to pick rows of them.

    With the fence these rows; without it all of x, ahead of a loop, which it keeps.
    """
    return _rows(*lax.optimization_barrier((x, chosen)))


def _rows(x: Array, chosen: Array) -> Array:
    first = chosen.ndim
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(first, first + x.ndim - 1)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    index = lax.reshape(chosen, (*chosen.shape, 1))
    inside = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, index, numbers, (1, *x.shape[1:]), mode=inside)
