"""The codec int4_outliers: 4 bits a value, and 16 for the largest of each group."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, UInt8

from kvjax.cache.codecs import uniform
from kvjax.cache.codecs.base import Codec, TensorCodec
from kvjax.cache.codecs.rounding import fitted, grouped, sixteen_bits
from kvjax.types import UserError, whole_number

_BITS = 4


class WithOutliers(NamedTuple):
    """Stored keys or values, in N groups of channels with R outliers each.

    Attributes:
      rest: all values, with 0 in the place of outliers.
      outliers: the largest values of each group.
      places: the channels of the outliers, within their group.
    """

    rest: uniform.Codes
    outliers: BFloat16[Array, "B K C N R"]
    places: UInt8[Array, "B K C N R"]


def int4_outliers(outliers: int = 1, group: int = 32, symmetric: bool = True) -> Codec:
    """Encodes as `int4`, with the largest magnitudes of every group in 16 bits.

        O = the r largest |x| of a group,  s = max over x not in O of |x| / 7
        x' = bfloat16(x) in O,  s round(x / s) elsewhere

    The number of outliers per group is fixed, as memory is allocated for it, and not
    all values above a threshold. Bytes per value: 1 / 2 + (2 + 3 r) / group; 84 a pair
    at D = 64.

    Args:
      outliers: r, of every group.
      group: channels that share a scale, 256 at most.
      symmetric: see `int8`.

    Source: dense and sparse parts as in KVQuant, Hooper et al. 2024, arXiv 2401.18079,
    section 3.4, on an even grid.

    Raises:
      UserError: as `int8`; or as many outliers as channels in a group.
    """
    group = whole_number("group", group, 1, 256)
    count = whole_number("outliers", outliers, 1)
    if count >= group:
        raise UserError(
            f"outliers {count} of a group of {group} channels leave none to encode: "
            f"give fewer than {group}, or use the codec identity"
        )
    tensor = _tensor(count, group, uniform.of_bits(_BITS, group, symmetric), symmetric)
    return Codec("int4_outliers", tensor, tensor)


@functools.cache
def _tensor(count: int, group: int, rest: TensorCodec, symmetric: bool) -> TensorCodec:
    def init(shape, dtype) -> WithOutliers:
        dense = rest.init(shape, dtype)
        each = (*shape[:-1], shape[-1] // group, count)
        outliers, places = jnp.zeros(each, jnp.bfloat16), jnp.zeros(each, jnp.uint8)
        return WithOutliers(dense, outliers, places)

    return TensorCodec(
        f"{rest.name}, {count} of each in 16 bits",
        init,
        encode=lambda x: _encode(x, count, group, rest),
        decode=_decode,
    )


def _encode(
    x: Float[Array, "B K T D"], count: int, group: int, rest: TensorCodec
) -> WithOutliers:
    flat, x = x.shape, grouped(x.astype(jnp.float32), x.shape[-1] // group)
    _, places = jax.lax.top_k(jnp.abs(x), count)
    outliers = jnp.take_along_axis(x, places, axis=-1)
    others = jnp.where(jnp.any(_at(places, group), axis=-2), 0.0, x)
    dense = rest.encode(others.reshape(flat))
    return WithOutliers(dense, sixteen_bits(outliers), places.astype(jnp.uint8))


def _decode(stored: WithOutliers, dtype: jnp.dtype) -> Float[Array, "B K C D"]:
    rest = uniform.decode(stored.rest, _BITS)
    x = grouped(rest, stored.places.shape[-2])
    here = _at(stored.places, x.shape[-1])
    values = stored.outliers.astype(jnp.float32)[..., None]
    outliers = jnp.sum(jnp.where(here, values, 0.0), axis=-2)
    x = jnp.where(jnp.any(here, axis=-2), outliers, x)
    return fitted(x.reshape(rest.shape), dtype)


def _at(places: Array, group: int) -> Array:
    """Returns [B, K, C, N, R, S], True at the channel of each outlier."""
    return jax.nn.one_hot(places, group, dtype=jnp.bool)
