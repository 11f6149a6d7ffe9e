"""How keys and values are stored: a codec turns pairs into what memory holds and back.

Every leaf of a stored pytree leads with [B, K, C], so that layouts can write and move
slots without knowing the codec.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.types import PyTree


class Codec(NamedTuple):
    """A pair of pure functions and an allocator.

    Attributes:
      init: (shape (B, K, C, D), dtype) -> stored zeros.
      encode: [B, K, T, D] -> stored, T in place of C.
      decode: stored -> [B, K, C, D] as attention reads it.
    """

    init: Callable[[tuple[int, ...], jnp.dtype], PyTree]
    encode: Callable[[Float[Array, "B K T D"]], PyTree]
    decode: Callable[[PyTree], Float[Array, "B K C D"]]


identity = Codec(init=jnp.zeros, encode=lambda x: x, decode=lambda stored: stored)
