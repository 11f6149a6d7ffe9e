"""The codec fp8: floating-point numbers of 8 bits."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from kvjax.cache.codecs.base import Codec, TensorCodec
from kvjax.cache.codecs.rounding import fitted, in_steps, scale_of

_KIND = jnp.float8_e4m3fn
_MOST = float(jnp.finfo(_KIND).max)  # 448


class Floats(NamedTuple):
    """Stored keys or values.

    Attributes:
      codes: float8_e4m3fn[B, K, C, D].
      scale: of every token and head; NaN if these hold NaN or an infinity.
    """

    codes: Float[Array, "B K C D"]
    scale: BFloat16[Array, "B K C 1"]


def fp8() -> Codec:
    """Encodes 8 bits a value: 4 of exponent, 3 of mantissa; a scale per token and head.

        s = max |x| / 448,  code = float8_e4m3fn(x / s),  x' = s code

    The error is at most 1/16 of a value, or 2^-10 s for small values: less than int8's
    near 0, more for the largest. Bytes per value: 1 + 2 / D; 132 a pair at D = 64.

    Source: Micikevicius et al. 2022, arXiv 2209.05433 (the format E4M3).
    """
    return Codec("fp8", _TENSOR, _TENSOR)


def _init(shape: tuple[int, ...], dtype: jnp.dtype) -> Floats:
    scale = jnp.zeros((*shape[:-1], 1), jnp.bfloat16)
    return Floats(jnp.zeros(shape, _KIND), scale)


def _encode(x: Float[Array, "B K T D"]) -> Floats:
    x = x.astype(jnp.float32)
    scale = scale_of(x, _MOST)
    steps = jnp.clip(in_steps(x, scale), -_MOST, _MOST)
    return Floats(steps.astype(_KIND), scale)


def _decode(stored: Floats, dtype: jnp.dtype) -> Float[Array, "B K C D"]:
    x = stored.codes.astype(jnp.float32) * stored.scale.astype(jnp.float32)
    return fitted(x, dtype)


_TENSOR = TensorCodec("float8_e4m3fn, one scale", _init, _encode, _decode)
