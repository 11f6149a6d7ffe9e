"""The interface of a codec, which encodes KV pairs for storage and decodes them.

Every array of a stored pytree leads with [B, K, C], or with C / G where G tokens are
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
    """The codec of one tensor, keys or values: pure functions and an allocator.

    Attributes:
      name: for reports.
      init: (shape (B, K, C, D), dtype) -> stored zeros; raises UserError for a D that
        it cannot encode.
      encode: [B, K, T, D] -> stored, T in place of C.
      decode: (stored, dtype) -> [B, K, C, D] in the dtype that attention reads.
      group_size: G, tokens that are encoded together. If it is not 1, `init` and
        `encode` take whole groups, and none of their pairs can be evicted.
      turned: for a codec that rotates another, (inner codec, D -> H [D, D]) such that
        decode(stored) = inner.decode(stored) H^T: attention rotates queries and outputs
        by H rather than all pairs. None for the others.
      on_host: whether the stored arrays lie in host memory; for values only, see
        `kvjax.cache.offload`.
      even_grid: whether the stored pytree is a `kvjax.types.Codes` that decodes to each
        code times the scale of its group, which kernels may compute themselves.
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
    """The codec of KV pairs.

    Attributes:
      name: as in the registry, for reports.
      key: encodes keys, with rotary positions or without, by `rope_positions`.
      value: encodes values.
      residual_length: the number of newest tokens per row whose pairs attention and
        policies read unencoded; the copies take the memory of as many pairs per head.
      sinks: the number of first tokens that are read unencoded, likewise.
      after_prompt: whether pairs are encoded after prefill only.
      of_layer: (layer, number of layers) -> the codec of that layer; None if all layers
        use this one. Otherwise `check` and `pair_bytes` describe most layers only.
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
    """Returns the bytes of one stored pair, with its share of its group's scales."""
    halves = (codec.key, codec.value)
    return sum(tensor_bytes(tensor, head_dim, dtype) for tensor in halves)


@functools.lru_cache(maxsize=64)
def tensor_bytes(tensor: TensorCodec, head_dim: int, dtype: str) -> float:
    """Returns the bytes of one stored key or value, with its share likewise."""
    shape = (1, 1, tensor.group_size, head_dim)
    stored = jax.eval_shape(lambda: tensor.init(shape, jnp.dtype(dtype)))
    leaves = jax.tree.leaves(stored)
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    return total / tensor.group_size


@functools.lru_cache(maxsize=64)
def check(codec: Codec, head_dim: int) -> None:
    """Checks that a codec's functions agree, by tracing them on shapes.

    Raises:
      UserError: it does not take this head_dim, or its functions raise, or `encode`
        and `decode` do not return what `init` and the input lead to expect.
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
    for step, found, expected in (("encode", stored, empty), ("decode", back, new)):
        if _described(found) != _described(expected):
            raise UserError(
                f"{tensor.name}: {step} gives {_described(found)}, and has to give "
                f"{_described(expected)} of {_described(new)}"
            )


def _traced(tensor: TensorCodec, step: str, run: Callable, *args: PyTree) -> PyTree:
    """Returns the shapes of a codec function's result; its errors become UserErrors."""
    try:
        return jax.eval_shape(run, *args)
    except UserError:
        raise
    except Exception as error:  # of any kind: the codec is somebody else's
        line = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{tensor.name}: {step} raises {type(error).__name__}: {line}"
        ) from error


def _described(tree: PyTree) -> str:
    """Returns a pytree of arrays as a text of their dtypes and shapes."""
    described = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
    return str(described).replace("'", "")
