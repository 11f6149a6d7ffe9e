"""Heads of a layer that keep alike: a part, which is a layer of the layout by itself.

::

    budget of a layer with four heads   256                 (64, 640, 64, 256)
    its parts                           [all]               [0, 2]  [3]  [1]
    slots, as allocated                 4 x 256             2 x 64, 256, 640

Within a part all heads have the same number of slots, so every layout, codec, policy
and kernel works on it as on a layer whose heads do not differ; what no head keeps is
not allocated.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.types import LayerOps, ModelSpec, UserError

Sizes = int | tuple[int, ...]  # pairs per head of a layer: of all heads, or of each
Heads = tuple[int, ...] | None  # of a part, in rising order; None for all


def of_sizes(sizes: Sizes | None) -> tuple[Heads, ...]:
    """The heads of each part of a layer, from the smallest to the largest."""
    if sizes is None or isinstance(sizes, int):
        return (None,)
    alike = lambda size: tuple(h for h, each in enumerate(sizes) if each == size)
    return tuple(alike(size) for size in sorted(set(sizes)))


def size_of(sizes: Sizes, heads: Heads) -> int:
    """Pairs per head that a part keeps."""
    return sizes if heads is None else sizes[heads[0]]


def each_head(sizes: Sizes, num_kv_heads: int) -> tuple[int, ...]:
    """[K], the size of every head."""
    return sizes if isinstance(sizes, tuple) else (sizes,) * num_kv_heads


def different(budget: Sequence[Sizes]) -> set[int]:
    """All sizes that some head of some layer has."""
    return {size for sizes in budget for size in each_head(sizes, 1)}


def simplest(sizes: Sequence[int]) -> Sizes:
    """One int where no head differs."""
    sizes = tuple(sizes)
    return sizes[0] if len(set(sizes)) == 1 else sizes


def here(heads: Heads, count: int) -> Heads:
    """Of a part, the heads that a device with `count` heads of the layer holds.

    Over a mesh every device's heads have the same sizes, in the same order.
    """
    return heads and tuple(head for head in heads if head < count)


def check_split(budget: Sequence[Sizes] | None, devices: int) -> None:
    """Raises UserError where heads that differ are split over devices unevenly."""
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
    """The model as its policies see a part."""
    if heads is None:
        return spec
    count = len(heads)
    queries = count * spec.queries_per_kv_head
    return dataclasses.replace(spec, num_kv_heads=count, num_heads=queries)


def taken(x: Array, heads: Heads | Array, axis: int = 1) -> Array:
    """The part's heads of an array."""
    return x if heads is None else jnp.take(x, jnp.asarray(heads), axis=axis)


def joined(found: Sequence[Array], heads: Sequence[Heads]) -> Array:
    """Arrays [B, heads, ...] of all parts as one [B, K, ...], heads in their order."""
    if len(found) == 1:
        return found[0]
    order = np.argsort([head for part in heads for head in part])
    return jnp.take(jnp.concatenate(found, axis=1), order, axis=1)


def ops_of(ops: LayerOps, heads: Heads | Array) -> LayerOps:
    """What a model lends the cache, for the part's heads."""
    if heads is None:
        return ops
    mine = jax.tree.map(lambda leaf: taken(leaf, heads, 0), ops.value_contribution)
    return ops._replace(value_contribution=mine)
