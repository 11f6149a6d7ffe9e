"""Rotations that spread large channels over a head, before its values are rounded."""

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
_DRAWS = 256  # of signs, to choose from


def rotated(codec: Codec | str = "int4") -> Codec:
    """Another codec, of keys and values that are turned first, and turned back after.

        stored = encode(x H),  x' = decode(stored) H^T,  H H^T = 1

    with H a Hadamard matrix over sqrt(D), which makes D small channels of a large one.
    What sets the scales shrinks, and turning back leaves the error's norm as it is.
    The rows of H have random signs, the same in every head and every run: without them
    an offset that all channels share would become a single large one.

    Attention turns its queries alike and its outputs back, q H (k H)^T = q k^T. To turn
    pairs back, for policies that look at them, costs D D multiplications for each.

    Finite values beyond the largest float32 over D are cut there, lest their sum be
    infinite. What is no number makes its whole head none. Bytes: the codec's own.

    Args:
      codec: a codec or its name.

    Source: QuaRot, Ashkboos et al. 2024, arXiv 2404.00456, section 4.

    Raises:
      UserError: something that is no codec, or one that differs between layers or is
        rotated already.
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
    """`rotated` around `int4`, whose arguments it takes; 72 bytes a pair at D = 64."""
    return rotated(uniform.int4(group, symmetric))


def int2_rotated(group: int | None = 32, symmetric: bool = False) -> Codec:
    """`rotated` around `int2`, whose arguments it takes; 48 bytes a pair at D = 64."""
    return rotated(uniform.int2(group, symmetric))


@functools.cache
def hadamard(order: int) -> Float[np.ndarray, "D D"]:
    """float32, orthonormal: entries +-1 / sqrt(order), rows of fixed random signs.

    Sylvester's doubling of 1, or of Paley's matrices of order 12 and 20. These have a
    column, or nearly one, that adds up all channels; the signs leave none, as in the
    randomized Hadamard matrices of QuaRot and QuIP# (Tseng et al. 2024, arXiv
    2402.04396, section 3).

    Raises:
      UserError: an order that is neither 2^n, 12 2^n nor 20 2^n.
    """
    odd = order // (order & -order)  # what is left without factors of two
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
    """Of random ones those under which the matrix spreads an offset most evenly.

    `RandomState` because NumPy never changes the numbers that it draws.
    """
    drawn = np.random.RandomState(0).choice([-1.0, 1.0], (_DRAWS, len(matrix)))
    largest = np.abs(drawn @ matrix).max(axis=1)
    return drawn[largest.argmin()]


def _paley(prime: int) -> Float[np.ndarray, "D D"]:
    """Paley's first construction, of order prime + 1, for primes that are 3 mod 4.

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
        hadamard(shape[-1])  # whether there is one
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
