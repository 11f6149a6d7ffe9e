"""How keys and values are stored: a codec turns pairs into what memory holds and back.

Every leaf of a stored pytree leads with [B, K, C], or with C / G where G tokens are
encoded together, so that layouts can write and move slots without knowing the codec.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.types import PyTree, UserError


class TensorCodec(NamedTuple):
    """How one of the two, keys or values, is stored: pure functions and an allocator.

    Attributes:
      name: for reports.
      init: (shape (B, K, C, D), dtype) -> stored zeros; raises UserError for a D that
        does not go.
      encode: [B, K, T, D] -> stored, T in place of C.
      decode: (stored, dtype) -> [B, K, C, D] in the dtype that attention reads.
      group_size: G, tokens that are encoded together; where it is not 1, `init` and
        `encode` are given whole groups, and none of their pairs can be evicted.
      turned: of what is a rotation around another: that one, and D -> the matrix H
        [D, D] of decode(stored) = inner.decode(stored) H^T, with which attention turns
        queries and outputs rather than pairs. None where there is none.
      on_host: whether what is stored lies in host memory; of values alone, see
        `kvjax.cache.offload`.
      even_grid: whether what is stored are `kvjax.types.Codes` of which `decode` gives
        each code times the scale of its group, so that kernels may do that themselves.
    """

    name: str
    init: Callable[[tuple[int, ...], jnp.dtype], PyTree]
    encode: Callable[[Float[Array, "B K T D"]], PyTree]
    decode: Callable[[PyTree, jnp.dtype], Float[Array, "B K C D"]]
    group_size: int = 1
    turned: "tuple[TensorCodec, Callable[[int], np.ndarray]] | None" = None
    on_host: bool = False
    even_grid: bool = False

    def __repr__(self) -> str:
        return f"TensorCodec({self.name!r})"


class Codec(NamedTuple):
    """How pairs are stored.

    Attributes:
      name: as in the registry, for reports.
      key: of keys, which are stored as the cache's `rope_positions` says.
      value: of values.
      residual_length: the newest tokens of every row whose pairs attention and policies
        see as they were, unencoded. They are kept besides, at the cost of so many pairs
        per head.
      sinks: the first tokens, likewise.
      after_prompt: whether pairs stay as they are while the prompt is read, and are
        encoded when it is in.
      of_layer: (layer, layers) -> the codec that stores that one; None is this one for
        all. `check` and `pair_bytes` of this one are then those of most layers.
    """

    name: str
    key: TensorCodec
    value: TensorCodec
    residual_length: int = 0
    sinks: int = 0
    after_prompt: bool = False
    of_layer: "Callable[[int, int], Codec] | None" = None

    def __repr__(self) -> str:
        return f"Codec({self.name!r})"


plain = TensorCodec("plain", jnp.zeros, lambda x: x, lambda stored, dtype: stored)
identity = Codec("identity", plain, plain)


@functools.lru_cache(maxsize=64)
def pair_bytes(codec: Codec, head_dim: int, dtype: str) -> float:
    """Bytes that one stored pair takes, the share of what it shares with others too."""
    halves = (codec.key, codec.value)
    return sum(tensor_bytes(tensor, head_dim, dtype) for tensor in halves)


@functools.lru_cache(maxsize=64)
def tensor_bytes(tensor: TensorCodec, head_dim: int, dtype: str) -> float:
    """Bytes of one stored key, or value; likewise."""
    shape = (1, 1, tensor.group_size, head_dim)
    stored = jax.eval_shape(lambda: tensor.init(shape, jnp.dtype(dtype)))
    leaves = jax.tree.leaves(stored)
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    return total / tensor.group_size


@functools.lru_cache(maxsize=64)
def check(codec: Codec, head_dim: int) -> None:
    """Tries a codec on shapes alone.

    Raises:
      UserError: it does not take this head_dim, or its functions raise or do not go
        together.
    """
    for tensor in (codec.key, codec.value):
        try:
            _check(tensor, head_dim)
        except UserError as error:
            raise UserError(f"codec {codec.name!r}: {error}") from None


def _check(tensor: TensorCodec, head_dim: int) -> None:
    dtype = jnp.dtype(jnp.float32)
    new = jax.ShapeDtypeStruct((2, 1, tensor.group_size, head_dim), dtype)
    empty = _traced(tensor, "init", lambda: tensor.init(new.shape, dtype))
    stored = _traced(tensor, "encode", tensor.encode, new)
    back = _traced(tensor, "decode", lambda x: tensor.decode(x, dtype), stored)
    for step, made, wanted in (("encode", stored, empty), ("decode", back, new)):
        if _told(made) != _told(wanted):
            raise UserError(
                f"{tensor.name}: {step} gives {_told(made)}, and has to give "
                f"{_told(wanted)} of {_told(new)}"
            )


def _traced(tensor: TensorCodec, step: str, run: Callable, *given: PyTree) -> PyTree:
    """Shapes of what a function of the codec gives; what it raises, as one line."""
    try:
        return jax.eval_shape(run, *given)
    except UserError:
        raise
    except Exception as error:  # of any kind: the codec is somebody else's
        told = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{tensor.name}: {step} raises {type(error).__name__}: {told}"
        ) from error


def _told(tree: PyTree) -> str:
    """A pytree of arrays by their dtypes and shapes."""
    told = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
    return str(told).replace("'", "")
