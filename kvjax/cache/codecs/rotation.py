"""Codecs that rotate heads before rounding, which spreads large channels."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache.codecs import uniform
from kvjax.cache.codecs.base import Codec, TensorCodec
from kvjax.cache.codecs.registry import make
from kvjax.cache.codecs.rounding import fitted
from kvjax.types import PyTree, UserError

_PALEY = {12: 11, 20: 19}  # orders that are no power of two, and their primes
_DRAWS = 256  # random signs to choose from


def rotated(codec: Codec | str = "int4") -> Codec:
    """Encodes rotated keys and values by another codec, and rotates them back.

        stored = encode(x H),  x' = decode(stored) H^T,  H H^T = 1

    with H a Hadamard matrix over sqrt(D), which spreads one large channel over D. The
    largest magnitudes, which set the scales, shrink; rotating back keeps the error's
    norm. The rows of H have random signs, the same in every head and every run: without
    them an offset common to all channels would become a single large channel.

    Attention rotates its queries and outputs instead of pairs, q H (k H)^T = q k^T.
    Policies that read pairs pay D D multiplications for rotating each one back.

    Finite values beyond the largest float32 / D are clipped, as their sum could be
    infinite. NaN or an infinity makes its whole head NaN. Bytes: the codec's own.

    Args:
      codec: a codec or its name.

    Source: QuaRot, Ashkboos et al. 2024, arXiv 2404.00456, section 4.

    Raises:
      UserError: something that is no codec, or one that differs between layers or is
        already rotated.
    """
    codec = make(codec)
    if codec.of_layer:
        raise UserError(
            f"codec {codec.name!r} differs between layers: rotate those that it is "
            "made of, by_layer(rotated(...), ...)"
        )
    if codec.key.turned or codec.value.turned:
        raise UserError(f"codec {codec.name!r} is rotated: rotate what lies inside")
    key, value = (_rotated(tensor) for tensor in (codec.key, codec.value))
    return codec._replace(name=f"{codec.name}_rotated", key=key, value=value)


def int4_rotated(group: int | None = 32, symmetric: bool = True) -> Codec:
    """Rotates, then encodes as `int4` (same arguments); 72 bytes a pair at D = 64."""
    return rotated(uniform.int4(group, symmetric))


def int2_rotated(group: int | None = 32, symmetric: bool = False) -> Codec:
    """Rotates, then encodes as `int2` (same arguments); 48 bytes a pair at D = 64."""
    return rotated(uniform.int2(group, symmetric))


@functools.cache
def hadamard(order: int) -> Float[np.ndarray, "D D"]:
    """Returns an orthonormal float32 matrix of +-1 / sqrt(order), with random signs.

    Sylvester's doubling of 1, or of Paley's matrices of order 12 and 20. These have a
    column, or nearly one, that sums all channels; fixed random signs of the rows
    prevent that, as in the randomized Hadamard matrices of QuaRot and QuIP# (Tseng et
    al. 2024, arXiv 2402.04396, section 3).

    Raises:
      UserError: an order that is neither 2^n, 12 2^n nor 20 2^n.
    """
    odd = order // (order & -order)  # without factors of two
    base = next((n for n in _PALEY if n % odd == 0 and odd > 1), 1)
    if order % base or (order // base) & (order // base - 1):
        raise UserError(
            f"no rotation for a head_dim of {order}: it has to be a power of two, or "
            "12 or 20 times one; use a codec that is not rotated"
        )
    matrix = _paley(_PALEY[base]) if base > 1 else np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return (_signs(matrix)[:, None] * matrix / np.sqrt(order)).astype(np.float32)


def _signs(matrix: Float[np.ndarray, "D D"]) -> Float[np.ndarray, " D"]:
    """Returns the signs, of random ones, that spread a common offset most evenly.

    `RandomState`, because NumPy guarantees that its numbers never change.
    """
    drawn = np.random.RandomState(0).choice([-1.0, 1.0], (_DRAWS, len(matrix)))
    largest = np.abs(drawn @ matrix).max(axis=1)
    return drawn[largest.argmin()]


def _paley(prime: int) -> Float[np.ndarray, "D D"]:
    """Returns Paley's first construction of order prime + 1, for primes 3 mod 4.

    1 + S, with S = [[0, 1], [-1, Q]] and Q[i, j] = 1 where i - j is a square, else -1.
    """
    squares = {i * i % prime for i in range(1, prime)}
    signs = [0] + [1 if i in squares else -1 for i in range(1, prime)]
    skew = np.ones((prime + 1, prime + 1))
    skew[:, 0] = -1
    skew[0, 0] = 0
    numbers = np.arange(prime)
    skew[1:, 1:] = np.array(signs)[(numbers[:, None] - numbers) % prime]
    return np.eye(prime + 1) + skew


@functools.cache
def _rotated(tensor: TensorCodec) -> TensorCodec:
    def init(shape: tuple[int, ...], dtype: jnp.dtype) -> PyTree:
        hadamard(shape[-1])  # raises if there is none of this order
        return tensor.init(shape, dtype)

    def encode(x: Float[Array, "B K T D"]) -> PyTree:
        most = float(jnp.finfo(jnp.float32).max) / x.shape[-1]
        x = x.astype(jnp.float32)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x)
        return tensor.encode(_times(x, hadamard(x.shape[-1])))

    def decode(stored: PyTree, dtype: jnp.dtype) -> Float[Array, "B K C D"]:
        x = tensor.decode(stored, jnp.dtype(jnp.float32))
        return fitted(_times(x, hadamard(x.shape[-1]).T), dtype)

    name = f"{tensor.name}, rotated"
    inner = tensor, hadamard
    return TensorCodec(name, init, encode, decode, tensor.group_size, inner)


def _times(x: Float[Array, "B K T D"], matrix: np.ndarray) -> Float[Array, "B K T D"]:
    return jnp.matmul(x, jnp.asarray(matrix), precision="highest")
