"""The residual: the first and the newest pairs of every row, kept unencoded.

A codec may ask for it (`Codec.sinks`, `Codec.residual_length`). These pairs are encoded
like all others; attention and policies read the unencoded copy in their place.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.cache.codecs import Codec
from kvjax.cache.layouts.base import put
from kvjax.types import EMPTY, Struct


class Residual(Struct):
    """The first S and the newest R pairs of every row.

    The token at position p lies at p if p < S, else at S + p mod R. Where keys are
    encoded in groups of neighbouring slots, the pair of slot s lies at s mod R.

    Attributes:
      k: [B, K, S + R, D].
      v: [B, K, S + R, D].
      positions: i32[B, K, S + R]; -1 where nothing is stored yet.
    """

    k: Array
    v: Array
    positions: Array


def empty(codec: Codec, shape: tuple[int, ...], dtype) -> Residual | None:
    """Returns an empty residual for pairs (B, K, C, D); None if the codec has none."""
    size = codec.sinks + codec.residual_length
    if not size:
        return None
    batch, heads, _, depth = shape
    return Residual(
        k=jnp.zeros((batch, heads, size, depth), dtype),
        v=jnp.zeros((batch, heads, size, depth), dtype),
        positions=jnp.full((batch, heads, size), EMPTY, jnp.int32),
    )


def of_pairs(
    codec: Codec, k: Array, v: Array, positions: Int[Array, "B K C"]
) -> Residual | None:
    """Returns the residual of a whole layer of pairs [B, K, C, D]."""
    residual = empty(codec, k.shape, k.dtype)
    if residual is None:
        return None
    slots = _all_slots(positions)
    residual = with_keys(residual, codec, k, positions, slots)
    return with_values(residual, codec, v, positions, slots)


def with_keys(
    residual: Residual,
    codec: Codec,
    k: Array,
    positions: Int[Array, "B K T"],
    slots: Int[Array, "B K T"],
) -> Residual:
    """Stores those of T new keys that belong here; a position of -1 is no key."""
    places = _places(residual, codec, positions, slots)
    return residual.replace(
        k=put(residual.k, places, k),
        positions=put(residual.positions, places, positions),
    )


def with_values(
    residual: Residual,
    codec: Codec,
    v: Array,
    positions: Int[Array, "B K T"],
    slots: Int[Array, "B K T"],
) -> Residual:
    """`with_keys` for the values of the same tokens."""
    places = _places(residual, codec, positions, slots)
    return residual.replace(v=put(residual.v, places, v))


def overlay(
    decoded: Array,
    unencoded: Array,
    residual: Residual,
    codec: Codec,
    positions: Int[Array, "B K C"],
    slots: Int[Array, "B K N"] | None = None,
) -> Array:
    """Replaces decoded pairs by their unencoded copies, where the residual has these.

    Args:
      decoded: keys or values [B, K, N, D] of some slots.
      unencoded: the residual's keys or values.
      residual: of the layer.
      codec: of the layer.
      positions: of all slots of the layer.
      slots: those of `decoded`; None for all.
    """
    if slots is None:
        slots = _all_slots(positions)
    else:
        positions = jnp.take_along_axis(positions, slots, axis=2)
    place = _place(codec, positions, slots)  # of an empty slot: any, masked below
    is_here = jnp.take_along_axis(residual.positions, place, axis=2) == positions
    is_here = (is_here & (positions >= 0))[..., None]
    copies = jnp.take_along_axis(unencoded, place[..., None], axis=2)
    return jnp.where(is_here, copies, decoded)


def _all_slots(positions: Int[Array, "B K C"]) -> Int[Array, "B K C"]:
    slots = jnp.arange(positions.shape[2], dtype=jnp.int32)
    return jnp.broadcast_to(slots, positions.shape)


def _place(
    codec: Codec, positions: Int[Array, "*axes"], slots: Int[Array, "*axes"]
) -> Int[Array, "*axes"]:
    """Returns the index at which a residual holds these tokens, if it holds them."""
    if codec.key.group_size > 1:
        return slots % codec.residual_length
    first, newest = codec.sinks, max(codec.residual_length, 1)
    later = jnp.minimum(first + positions % newest, first + codec.residual_length - 1)
    return jnp.where(positions < first, positions, later)


def _places(
    residual: Residual,
    codec: Codec,
    positions: Int[Array, "B K T"],
    slots: Int[Array, "B K T"],
) -> Int[Array, "B K T"]:
    """Returns the indices of new pairs in the residual, S + R for those left out."""
    grouped = codec.key.group_size > 1
    order = jnp.where(positions < 0, EMPTY, slots) if grouped else positions
    newest = jnp.max(order, axis=-1, keepdims=True)
    kept = (order > newest - codec.residual_length) | (positions < codec.sinks)
    beyond = residual.positions.shape[2]
    return jnp.where(kept & (positions >= 0), _place(codec, positions, slots), beyond)
