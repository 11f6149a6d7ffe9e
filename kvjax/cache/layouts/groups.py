"""Storage of keys that are encoded in groups of G neighbouring slots.

A group is encoded once all of its slots are filled; until then its keys are in the
residual.

::

    slot     0 ......... G-1   G ....... 2G-1   2G ... live-1
             one group         one group        incomplete: in the residual
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.cache.codecs import TensorCodec
from kvjax.cache.layouts.base import put
from kvjax.types import PyTree


def rounded(capacity: int, codec: TensorCodec) -> int:
    """Returns the capacity rounded up to whole groups."""
    return -(-capacity // codec.group_size) * codec.group_size


def with_new(
    stored: PyTree,
    codec: TensorCodec,
    residual: Array,
    new: Array,
    slots: Int[Array, "B K T"],
    capacity: int,
) -> PyTree:
    """Encodes and stores the groups that T new keys complete.

    Args:
      stored: the codec's pytree; its arrays lead with [B, K, groups].
      codec: encodes G slots together.
      residual: [B, K, R, D], slot s at s mod R, before the new keys are written there.
      new: [B, K, T, D].
      slots: of the new keys, consecutive from the first empty one; `capacity` for none.
      capacity: slots of a head.
    """
    size, held, count = codec.group_size, residual.shape[2], slots.shape[2]
    first = slots[..., :1]
    past = first + jnp.sum(slots < capacity, axis=-1, keepdims=True, dtype=jnp.int32)
    most = (size - 1 + count) // size  # groups that so many keys can complete
    group = first // size + jnp.arange(most, dtype=jnp.int32)[None, None]
    within = jnp.arange(size, dtype=jnp.int32)[None, None, None]
    at = (group[..., None] * size + within).reshape(*slots.shape[:2], -1)
    place = jnp.where(at < first, at % held, held + jnp.minimum(at - first, count - 1))
    both = jnp.concatenate([residual, new.astype(residual.dtype)], axis=2)
    made = codec.encode(jnp.take_along_axis(both, place[..., None], axis=2))
    whole = (group + 1) * size <= past
    beyond = rounded(capacity, codec) // size
    target = jnp.where(whole, group, beyond)
    return jax.tree.map(lambda leaf, new: put(leaf, target, new), stored, made)


def all_of(codec: TensorCodec, keys: Array) -> PyTree:
    """Encodes keys [B, K, C, D], with zeros in the rest of the last group."""
    short = rounded(keys.shape[2], codec) - keys.shape[2]
    return codec.encode(jnp.pad(keys, [(0, 0), (0, 0), (0, short), (0, 0)]))
