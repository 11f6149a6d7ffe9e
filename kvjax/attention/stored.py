"""Keys and values as their codec stores them, for attention without a decoded copy.

Every function of `kvjax.attention` takes `Stored` in place of an array. A backend that
knows the codes reads them; the others decode piece by piece, or all at once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.types import Codes, PyTree, Struct, static_field


class Stored(Struct):
    """The keys or the values of a layer, as its codec stores them.

    Attributes:
      arrays: the codec's arrays; each leads with [B, K, C].
      codec: a `kvjax.cache.codecs.TensorCodec`.
      shape: (B, K, C, D) of the decoded array; in a slice only C and D are valid.
      dtype: dtype of the decoded array.
    """

    arrays: PyTree
    codec: Any = static_field()
    shape: tuple[int, int, int, int] = static_field()
    dtype: jnp.dtype = static_field()

    def decoded(self) -> Float[Array, "B K C D"]:
        """Decodes the whole array."""
        return self.codec.decode(self.arrays, self.dtype)

    @property
    def codes(self) -> Codes | None:
        """Returns the codes if their grid is even (kernels read those), or None."""
        return self.arrays if self.codec.even_grid else None

    @property
    def inner(self) -> "Stored":
        """Returns the pairs in the rotated basis; itself if nothing is rotated."""
        turned = self.codec.turned
        return self.replace(codec=turned[0]) if turned else self


Tensor = Array | Stored  # keys, or values


def decoded(tensor: Tensor) -> Float[Array, "B K C D"]:
    """Returns keys or values as one decoded array."""
    return tensor.decoded() if isinstance(tensor, Stored) else tensor


def unturned(
    tensor: Tensor | None,
) -> tuple[Tensor | None, Float[Array, "D D"] | None]:
    """Splits keys or values into those in the rotated basis and the rotation, or None.

    Of x H stored, x' = decode(stored) H^T: so q (x')^T = (q H) decode(stored)^T, and
    p x' = (p decode(stored)) H^T: rotating queries and outputs costs less than pairs.
    """
    if not isinstance(tensor, Stored) or tensor.codec.turned is None:
        return tensor, None
    rotation = tensor.codec.turned[1]
    return tensor.inner, jnp.asarray(rotation(tensor.shape[-1]))


def turned(x: Float[Array, "... D"], matrix: Array | None) -> Float[Array, "... D"]:
    """Returns x times the matrix, in x's dtype; x if there is no matrix."""
    if matrix is None:
        return x
    wide = jnp.matmul(
        x.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST
    )
    return wide.astype(x.dtype)
