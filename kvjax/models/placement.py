"""Splits the weights of one model over the devices of a mesh."""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.models import decoder
from kvjax.parallel import axes
from kvjax.types import ModelSpec, PyTree


def notice(over: Mesh, spec: ModelSpec) -> str | None:
    """Returns a message that names the weights left whole; None if all are split."""
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


def of(params: PyTree) -> Mesh | None:
    """Returns the mesh that params are split over; None on one device."""
    found = getattr(params["embed"].sharding, "mesh", None)
    return found if found is not None and axes.HEADS in found.axis_names else None


def fitted(spec: ModelSpec, over: Mesh | None) -> ModelSpec:
    """Returns the spec of split params; see `ModelSpec.ff_groups`."""
    ways = axes.ways(over, axes.MODEL) if over else 1
    groups = 1 if spec.ff_dim % ways else ways
    return dataclasses.replace(spec, ff_groups=groups)


def place(spec: ModelSpec, over: Mesh, path: tuple, weight: np.ndarray) -> jax.Array:
    """Splits one weight, in the layout of a single device, over the mesh.

    Args:
      spec: of the split params, see `fitted`.
      over: the mesh.
      path: keys and indices that lead to the weight in the params.
      weight: the whole array, on the host; every device receives only its own shard.
    """
    sharding = functools.reduce(lambda node, key: node[key], path, _of(spec, over))
    if str(path[-1]).startswith("gate_up"):
        weight = _grouped(weight, spec.ff_groups)
    return jax.make_array_from_callback(weight.shape, sharding, weight.__getitem__)


def split(spec: ModelSpec, params: PyTree, over: Mesh) -> PyTree:
    """Splits the params of a single device over the mesh."""
    fit = fitted(spec, over)
    plain = lambda key: getattr(key, "key", getattr(key, "idx", None))
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: place(fit, over, tuple(map(plain, path)), np.asarray(leaf)),
        params,
    )


def _grouped(weight: np.ndarray, groups: int) -> np.ndarray:
    """Reorders the 2 F axis of gate and up from one group into several.

    It is the last axis of experts, [X, M, 2 F], else the first, [2 F, M] or [2 F].
    """
    axis = 2 if weight.ndim == 3 else 0
    front, back = weight.shape[:axis], weight.shape[axis + 1 :]
    parts = weight.reshape(*front, 2, groups, -1, *back)
    return np.swapaxes(parts, axis, axis + 1).reshape(weight.shape)


@functools.lru_cache(maxsize=4)
def _of(spec: ModelSpec, over: Mesh) -> PyTree:
    return decoder.param_partitions(spec, over)
