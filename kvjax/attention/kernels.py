"""Adapter from the Pallas kernels to the package's types, and their self-test.

Kernels take and return arrays. Their modules are imported on first use: Mosaic GPU
and Mosaic TPU do not import on every machine.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.attention.inputs import AttentionSpec, Pairs, Queries, Unsupported
from kvjax.attention.stored import Stored, Tensor, decoded
from kvjax.pallas.common import Scored, device, not_hopper
from kvjax.types import Codes, Observation, Partial, Scoring, numbers_of

TOLERATED = 0.05  # absolute error of results around 1, rounded to bfloat16


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of one module, as the fields of a `Backend`.

    Attributes:
      module: full name of the module that holds them.
      writes: whether the decode kernel also writes the new KV pair. On TPU it does,
        because XLA's own write at a dynamic slot may copy the cache.
      interpret: whether to interpret them, slowly, on any machine.
    """

    module: str
    writes: bool = False
    interpret: bool = False

    def functions(self) -> dict[str, Any]:
        """Returns the fields of a `Backend`."""
        write_attend = self.write_attend if self.writes else None
        return {
            "attend": self.attend,
            "attention_stats": self.attention_stats,
            "check": self.check,
            "self_test": functools.partial(self_test, self.attend, write_attend),
            "write_attend": write_attend,
            "write_grain": self.write_grain,
        }

    def interpreted(self) -> "Kernels":
        """Returns the same kernels, run by the interpreter."""
        return dataclasses.replace(self, interpret=True)

    def check(self, queries: Queries, pairs: Pairs, spec: AttentionSpec) -> None:
        """Raises Unsupported if the kernels cannot take these arrays on this device."""
        platform, kind = (None, None) if self.interpret else device()
        if platform == "gpu" and (reason := not_hopper(kind)):
            raise Unsupported(reason, warn=True)
        if "attn_weights" in spec.stats:
            raise Unsupported("no fused kernel returns all the weights")
        k = jax.ShapeDtypeStruct(pairs.k.shape, pairs.k.dtype)
        module = self._load()
        if reason := module.unsupported_reason(queries.q, k, spec.stats, kind):
            raise Unsupported(reason)

    def attend(
        self, queries: Queries, pairs: Pairs, spec: AttentionSpec
    ) -> tuple[Partial, Observation]:
        """Implements `kvjax.attention.attend`."""
        (q, *rows), (*tensors, pos) = queries, pairs
        found = self._run("attend", spec, q, *map(self._readable, tensors), pos, *rows)
        return _to_package_types(found, queries)

    def attention_stats(
        self, queries: Queries, pairs: Pairs, whole: Partial, spec: AttentionSpec
    ) -> Observation:
        """Implements `kvjax.attention.attention_stats`."""
        (q, *rows), k = queries, self._readable(pairs.k)
        arrays = q, k, pairs.positions, *rows, whole.max_logit, whole.denominator
        found = self._run("attention_stats", spec, *arrays)
        return Observation(num_tokens=queries.n, positions=queries.positions, **found)

    def write_attend(
        self, queries: Queries, pairs: Pairs, new_k, new_v, slot, spec: AttentionSpec
    ) -> tuple[Partial, Observation, Array, Array]:
        """Implements `kvjax.attention.write_attend`."""
        (q, *rows), (*tensors, pos) = queries, pairs
        arrays = q, new_k, new_v, slot, *map(self._readable, tensors), pos, *rows
        found, k, v, *_ = self._run("write_attend", spec, *arrays)
        return *_to_package_types(found, queries), k, v

    def write_grain(self, tensor: Tensor) -> int | None:
        """Returns the divisor of slots for a fused write; None if there is none."""
        shown = self._readable_form(tensor)
        return self._load().write_grain(shown) if shown is not None else None

    def _readable(self, tensor: Tensor) -> Array | Codes:
        """Returns keys or values for the kernels: known codes, else decoded."""
        shown = self._readable_form(tensor)
        return decoded(tensor) if shown is None else shown

    def _readable_form(self, tensor: Tensor) -> Array | Codes | None:
        """Returns the array or its known codes; None if they must be decoded."""
        if not isinstance(tensor, Stored):
            return tensor
        codes = tensor.codes
        known = codes is not None and self._load().reads(codes, tensor.shape[-1])
        return codes if known else None

    def _load(self) -> ModuleType:
        return importlib.import_module(self.module)

    def _run(self, name: str, spec: AttentionSpec, *arrays) -> Any:
        kernel = _jitted(getattr(self._load(), name))
        options = spec.scoring._asdict()
        return kernel(*arrays, stats=spec.stats, interpret=self.interpret, **options)


@functools.cache
def _jitted(kernel: Callable) -> Callable:
    """Wraps a kernel in `jit`, so that a program lowers it once for all layers.

    Lowering a GPU kernel takes a quarter of a second per call.
    """
    static = "stats", "interpret", *Scoring._fields
    return jax.jit(kernel, static_argnames=static)


def _to_package_types(found: Scored, queries: Queries) -> tuple[Partial, Observation]:
    """Converts a kernel's result to the package's types."""
    return Partial(found.out, found.max_logit, found.denominator), Observation(
        num_tokens=queries.n,
        positions=queries.positions,
        attn_sum=found.attn_sum,
        attn_sq_sum=found.attn_sq_sum,
        last_attn=found.last_attn,
    )


def self_test(
    attend: Callable[..., tuple[Partial, Observation]],
    write_attend: Callable[..., tuple] | None,
    head_dim: int,
    codec: Any = None,
) -> str | None:
    """Compares a backend with NumPy on a small case; returns the failure, or None.

    Args:
      attend: the `Backend`'s function, called in bfloat16.
      write_attend: likewise; None where it has none.
      head_dim: the head dimension to test.
      codec: the `TensorCodec` that stores keys and values; None for none.
    """
    error = max(_attend_error(attend, length, head_dim, codec) for length in (1, 24))
    if write_attend:
        error = max(error, _write_error(write_attend, head_dim, codec))
    return None if error < TOLERATED else f"it is {error:.2g} off"


def _attend_error(attend: Callable, length: int, depth: int, codec: Any) -> float:
    """Returns the largest difference from NumPy's output and summed weights.

    The slots do not fill a whole number of tiles, and the empty ones hold NaN.
    """
    slots, last = 328, 299  # of them 300 are live
    draw = np.random.default_rng(0).normal
    array = lambda *shape: np.array(jnp.asarray(draw(size=shape), jnp.bfloat16))
    q, k, v = array(2, 4, length, depth), array(2, slots, depth), array(2, slots, depth)
    pos = np.where(np.arange(slots) <= last, np.arange(slots), -1)
    q_pos = last - np.arange(length)[::-1]
    seen = (pos >= 0) & (pos <= q_pos[:, None])
    row = lambda x: jnp.asarray(x)[None]
    held = lambda x: decoded(_stored(row(x), codec))[0]
    exact = [np.asarray(x, np.float64) for x in (q, held(k), held(v))]
    weights = np.einsum("kgtd,kcd->kgtc", *exact[:2]) / np.sqrt(depth)
    weights = np.where(seen, np.exp(weights), 0)
    weights /= weights.sum(-1, keepdims=True)
    k[:, last + 1 :], v[:, last + 1 :] = np.nan, np.nan
    found, observation = jax.jit(attend)(
        Queries(row(q), row(q_pos.astype(np.int32)), jnp.full((1,), length, jnp.int32)),
        Pairs(
            _stored(row(k), codec),
            _stored(row(v), codec),
            row(np.broadcast_to(pos, (2, slots)).astype(np.int32)),
        ),
        AttentionSpec(frozenset({"attn_sum"})),
    )
    out, denominator, sums = (
        np.asarray(x, np.float64)[0]
        for x in (found.out, found.denominator, observation.attn_sum)
    )
    out /= denominator[..., None]
    return max(
        _largest(out - np.einsum("kgtc,kcd->kgtd", weights, exact[2])),
        _largest(sums - weights.mean(1).sum(1)),
    )


def _write_error(write_attend: Callable, depth: int, codec: Any) -> float:
    """Returns the largest difference of K and V after a fused write."""
    draw = np.random.default_rng(1).normal
    array = lambda *shape: jnp.asarray(draw(size=shape), jnp.bfloat16)
    k, v = (_stored(x, codec) for x in array(2, 1, 2, 128, depth))
    new = [_numbers(_stored(x, codec)) for x in array(2, 1, 2, 1, depth)]
    new_k, new_v = (x[:, :, 0] for x in new)
    one, zeros = jnp.ones((1,), jnp.int32), jnp.zeros((1, 2, 128), jnp.int32)
    slot = jnp.asarray(
        [[37, 128]], jnp.int32
    )  # the second head's slot is past the end: dropped
    queries = Queries(array(1, 2, 4, 1, depth), one[:, None], one)
    new = new_k, new_v, slot
    run = jax.jit(write_attend)
    found = run(queries, Pairs(k, v, zeros), *new, AttentionSpec())[2:]
    put = lambda old, new: _numbers(old).at[0, 0, 37].set(new[0, 0])
    wide = lambda x: np.asarray(_numbers(x), np.float64)
    pairs = zip(found, (put(k, new_k), put(v, new_v)), strict=True)
    return max(_largest(wide(a) - wide(b)) for a, b in pairs)


def _stored(x: Array, codec: Any) -> Tensor:
    """Encodes keys or values [B, K, C, D] with the codec, if any."""
    return x if codec is None else Stored(codec.encode(x), codec, x.shape, x.dtype)


def _numbers(tensor: Tensor | Codes) -> Array:
    """Returns the array that a fused write updates: the numbers, or their codes."""
    return numbers_of(tensor.codes if isinstance(tensor, Stored) else tensor)


def _largest(difference: np.ndarray) -> float:
    """Returns the largest absolute value; infinite if any is NaN."""
    return float(np.max(np.nan_to_num(np.abs(difference), nan=np.inf)))
