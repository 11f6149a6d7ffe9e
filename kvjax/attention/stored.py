"""Keys and values as they are stored, for attention that reads no decoded copy.

Every function of `kvjax.attention` takes `Stored` in the place of an array. A backend
that knows the codes reads them; the others read pieces that are decoded when they are
needed, or all at once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.types import Codes, PyTree, Struct, static_field


class Stored(Struct):
    """The keys, or the values, of a layer as its codec stores them.

    Attributes:
      arrays: the codec's; each leads with [B, K, C].
      codec: a `kvjax.cache.codecs.TensorCodec`.
      shape: of what is stored, (B, K, C, D); of a piece of it, C and D alone hold.
      dtype: that it is decoded to.
    """

    arrays: PyTree
    codec: Any = static_field()
    shape: tuple[int, int, int, int] = static_field()
    dtype: jnp.dtype = static_field()

    def decoded(self) -> Float[Array, "B K C D"]:
        """All of it as numbers."""
        return self.codec.decode(self.arrays, self.dtype)

    @property
    def codes(self) -> Codes | None:
        """What it is if that is codes on a grid around 0, which kernels read."""
        return self.arrays if self.codec.even_grid else None

    @property
    def inner(self) -> "Stored":
        """What lies inside its rotation; itself where there is none."""
        turned = self.codec.turned
        return self.replace(codec=turned[0]) if turned else self


Pairs = Array | Stored  # keys, or values


def decoded(pairs: Pairs) -> Float[Array, "B K C D"]:
    """Keys or values as numbers."""
    return pairs.decoded() if isinstance(pairs, Stored) else pairs


def unturned(pairs: Pairs) -> tuple[Pairs, Float[Array, "D D"] | None]:
    """What lies inside a rotation, and the rotation; None where there is none.

    Of x H stored, x' = decode(stored) H^T: so q (x')^T = (q H) decode(stored)^T, and
    p x' = (p decode(stored)) H^T, which turn queries and outputs in place of all pairs.
    """
    if not isinstance(pairs, Stored) or pairs.codec.turned is None:
        return pairs, None
    rotation = pairs.codec.turned[1]
    return pairs.inner, jnp.asarray(rotation(pairs.shape[-1]))


def turned(x: Float[Array, "... D"], matrix: Array | None) -> Float[Array, "... D"]:
    """x times the matrix, in x's dtype; x where there is none."""
    if matrix is None:
        return x
    wide = jnp.matmul(
        x.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST
    )
    return wide.astype(x.dtype)
