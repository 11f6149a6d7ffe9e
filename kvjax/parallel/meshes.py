"""Device meshes: made, joined, and rows of a batch laid over them.

A mesh is asked for as `data:2,model:4`: rows of the batch are split in two, the model
in four. `kvjax.models.placement` says which part of the weights lies where,
`kvjax.cache.sharded` the same of the KV state.
"""

import contextlib
import functools
import math
import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.parallel import axes
from kvjax.types import UserError

_ADDRESS = re.compile(r".+:\d+")
_ASKED = re.compile(r"(data|model):(\d+)")


def start(
    coordinator_address: str,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the processes of a run on several hosts; before anything else of JAX.

    All processes run the same program on the same input and get the same results; a
    mesh is over the devices of all of them.

    Args:
      coordinator_address: HOST:PORT, where process 0 listens; `auto` where JAX can tell
        all three by itself (Cloud TPU, SLURM, Open MPI, Kubernetes).
      num_processes: how many there are.
      process_id: which of them this is, from 0.

    Raises:
      UserError: an address of another form, or numbers that do not fit.
    """
    if coordinator_address == "auto":
        jax.distributed.initialize()
        return
    if not _ADDRESS.fullmatch(coordinator_address):
        raise UserError(
            f"coordinator_address {coordinator_address!r}: give HOST:PORT, or auto"
        )
    if None in (num_processes, process_id) or not 0 <= process_id < num_processes:
        raise UserError(
            f"num_processes {num_processes}, process_id {process_id}: give both, the "
            "id from 0 and below the number"
        )
    jax.distributed.initialize(coordinator_address, num_processes, process_id)


@functools.lru_cache(maxsize=16)
def mesh(asked: str, num_kv_heads: int) -> Mesh:
    """The mesh that was asked for, over all devices, with the axes of `axes`.

    Where the KV heads do not divide over the devices of a model, they are split over as
    many of them as they do, and the same on the others.

    Args:
      asked: `data:R,model:N`, either or both; one that is left out is 1.
      num_kv_heads: of the model.

    Raises:
      UserError: a text that is not of this form, or another number of devices than
        there are, in all processes together.
    """
    rows, model = sizes(asked)
    heads = math.gcd(num_kv_heads, model)
    shape = (rows, heads, model // heads)
    names = (axes.DATA, axes.HEADS, axes.COPIES)
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def sizes(asked: str) -> tuple[int, int]:
    """Devices along the data and the model axis of a mesh; raises as `mesh` does."""
    parts = [_ASKED.fullmatch(part.strip()) for part in str(asked).split(",")]
    found = dict(part.groups() for part in parts if part)
    if not all(parts) or len(found) < len(parts) or "0" in found.values():
        raise UserError(
            f"mesh {asked!r}: give the devices along each axis as data:2,model:4"
        )
    rows, model = int(found.get("data", 1)), int(found.get("model", 1))
    if rows * model != jax.device_count():
        raise UserError(
            f"mesh {asked!r} is of {rows * model} devices, and there are "
            f"{jax.device_count()}: change the numbers"
        )
    return rows, model


def use(over: Mesh | None) -> contextlib.AbstractContextManager:
    """Within it, programs are traced, and run, over the mesh; None is one device."""
    return jax.set_mesh(over) if over else contextlib.nullcontext()


def shard_rows(over: Mesh | None, *arrays: np.ndarray) -> tuple[jax.Array, ...]:
    """Arrays whose first axis is rows, each device given its own; None is the default.

    In a run of several processes all of them hold the whole arrays.
    """
    if over is None:
        return tuple(map(jax.device_put, arrays))  # jnp.asarray runs a program
    split = NamedSharding(over, PartitionSpec(axes.DATA))
    return tuple(
        jax.make_array_from_callback(x.shape, split, np.asarray(x).__getitem__)
        for x in arrays
    )
