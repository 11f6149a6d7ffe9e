"""The axes of a device mesh, and what code inside a program can ask of them.

A mesh has three axes. `data` splits the rows of a batch; `heads` splits the KV heads,
and everything that belongs to them; `copies` is there where more devices share a model
than its KV heads can be split over: heads are the same on all of them, while
feed-forward and vocabulary are split over `heads` and `copies` together.

Without a mesh (`jax.set_mesh`) every function here leaves its argument as it is.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, Shaped

from kvjax.types import PyTree

DATA, HEADS, COPIES = "data", "heads", "copies"
MODEL = (HEADS, COPIES)
RULES = {  # logical axis to mesh axes
    "batch": (DATA,),
    "heads": (HEADS,),  # what lies KV head by KV head in `qkv` and `out`
    "ff": MODEL,
    "vocab": MODEL,
    "experts": (),  # every expert is split by `ff`: none waits for another
}


def mesh() -> jax.sharding.AbstractMesh | None:
    """Returns the mesh that the traced program is split over; None inside a shard."""
    found = jax.sharding.get_abstract_mesh()
    split = HEADS in found.axis_names and HEADS not in found.manual_axes
    return found if split else None


def partition(
    over: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    units: Sequence[int],
    names: Sequence[str | None],
) -> PartitionSpec:
    """Returns the PartitionSpec of an array; an axis that does not divide is whole.

    Args:
      over: the mesh.
      units: of each axis of the array, what must not be cut in two: its elements, or
        the heads in it.
      names: of each axis, a logical axis of `RULES` or None.
    """
    parts = []
    for count, name in zip(units, names, strict=True):
        split = RULES[name] if name else ()
        even = split and count % ways(over, split) == 0
        parts.append((split if len(split) > 1 else split[0]) if even else None)
    return PartitionSpec(*parts)


def ways(
    over: jax.sharding.Mesh | jax.sharding.AbstractMesh, split: Sequence[str]
) -> int:
    """Returns the number of shards that these mesh axes make."""
    parts = 1
    for axis in split:
        parts *= over.shape[axis]
    return parts


def constrain(x: Array, *names: str | None) -> Array:
    """Constrains the sharding of an array's leading axes; the others stay whole."""
    over = mesh()
    if over is None:
        return x
    names = (*names, *(None,) * (x.ndim - len(names)))
    return jax.lax.with_sharding_constraint(x, partition(over, x.shape, names))


def per_shard(body: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
    """Runs `body` on every shard; collectives are those that `body` calls."""
    return jax.shard_map(
        body, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def to_host(x: PyTree) -> PyTree:
    """Gathers whole arrays to the host, from all devices and processes."""
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(x)):
        return jax.device_get(x)
    return multihost_utils.process_allgather(x, tiled=True)


def psum_model(x: Array) -> Array:
    """Sums over the shards of a model; outside a shard returns x."""
    return jax.lax.psum(x, MODEL) if _inside() else x


def all_heads(x: Shaped[Array, "B K ..."]) -> Shaped[Array, "B H ..."]:
    """Gathers all H heads, in order, inside a shard that holds K of them."""
    return jax.lax.all_gather(x, HEADS, axis=1, tiled=True) if _inside() else x


def head_numbers(count: int, heads: Sequence[int] | None) -> Int[Array, "K"] | None:
    """Returns the indices in the layer of some of this shard's `count` heads.

    Over a mesh a shard's first head has the number 0 only on the first device.
    """
    if heads is None and not _inside():
        return None
    here = jnp.asarray(range(count) if heads is None else heads, jnp.int32)
    return here + jax.lax.axis_index(HEADS) * count if _inside() else here


def any_head(x: Bool[Array, "..."]) -> Bool[Array, "..."]:
    """Returns whether x holds in any shard of heads of the same rows."""
    if not _inside():
        return x
    return jax.lax.pmax(x.astype(jnp.int32), HEADS) > 0


def _inside() -> bool:
    return HEADS in jax.sharding.get_abstract_mesh().manual_axes
