"""Head groups: heads of a layer with the same budget, stored as a layer of their own.

::

    budget of a layer with four heads   256                 (64, 640, 64, 256)
    its head groups                     [all]               [0, 2]  [3]  [1]
    slots, as allocated                 4 x 256             2 x 64, 256, 640

All heads of a group have the same number of slots, so layouts, codecs, policies and
kernels process it like a layer with uniform heads. Memory is allocated only for the
slots of each head's own budget.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.types import LayerOps, ModelSpec, UserError

Sizes = int | tuple[int, ...]  # pairs per head of a layer: of all heads, or of each
Heads = tuple[int, ...] | None  # of a group, in ascending order; None for all heads


def of_sizes(sizes: Sizes | None) -> tuple[Heads, ...]:
    """Returns the heads of each group of a layer, from the smallest to the largest."""
    if sizes is None or isinstance(sizes, int):
        return (None,)
    group = lambda size: tuple(h for h, each in enumerate(sizes) if each == size)
    return tuple(group(size) for size in sorted(set(sizes)))


def size_of(sizes: Sizes, heads: Heads) -> int:
    """Returns the pairs per head of a group."""
    return sizes if heads is None else sizes[heads[0]]


def sizes_per_head(sizes: Sizes, num_kv_heads: int) -> tuple[int, ...]:
    """Returns the size of every head, [K]."""
    return sizes if isinstance(sizes, tuple) else (sizes,) * num_kv_heads


def distinct_sizes(budget: Sequence[Sizes]) -> set[int]:
    """Returns the sizes that occur in any head of any layer."""
    return {size for sizes in budget for size in sizes_per_head(sizes, 1)}


def simplify(sizes: Sequence[int]) -> Sizes:
    """Returns one int if all heads have the same size, else a tuple."""
    sizes = tuple(sizes)
    return sizes[0] if len(set(sizes)) == 1 else sizes


def local_heads(heads: Heads, count: int) -> Heads:
    """Returns the group's heads on a device that holds `count` heads of the layer.

    Over a mesh, all devices have heads of the same sizes in the same order.
    """
    return heads and tuple(head for head in heads if head < count)


def check_split(budget: Sequence[Sizes] | None, devices: int) -> None:
    """Raises UserError unless every device gets heads of the same sizes."""
    for index, sizes in enumerate(budget or ()):
        if isinstance(sizes, int):
            continue
        count = len(sizes) // devices
        if sizes != sizes[:count] * devices:
            raise UserError(
                f"layer {index}'s heads keep {sizes} pairs, and are split over "
                f"{devices} devices, each of which has to keep the same: give sizes "
                f"that repeat every {count} heads, or split rows only"
            )


def spec_of(spec: ModelSpec, heads: Heads) -> ModelSpec:
    """Returns the shape of a model with the group's heads only."""
    if heads is None:
        return spec
    count = len(heads)
    queries = count * spec.queries_per_kv_head
    return dataclasses.replace(spec, num_kv_heads=count, num_heads=queries)


def take(x: Array, heads: Heads | Array, axis: int = 1) -> Array:
    """Selects the group's heads of an array."""
    return x if heads is None else jnp.take(x, jnp.asarray(heads), axis=axis)


def concatenate(arrays: Sequence[Array], groups: Sequence[Heads]) -> Array:
    """Joins the groups' arrays [B, heads, ...] to [B, K, ...], in the heads' order."""
    if len(arrays) == 1:
        return arrays[0]
    order = np.argsort([head for heads in groups for head in heads])
    return jnp.take(jnp.concatenate(arrays, axis=1), order, axis=1)


def ops_of(ops: LayerOps, heads: Heads | Array) -> LayerOps:
    """Returns the model's functions for the group's heads."""
    if heads is None:
        return ops
    own = jax.tree.map(lambda leaf: take(leaf, heads, 0), ops.value_contribution)
    return ops._replace(value_contribution=own)
