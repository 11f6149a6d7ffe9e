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

from kvjax.attention.reference import NO_STATS, PLAIN
from kvjax.attention.stored import Pairs, Stored, decoded
from kvjax.pallas.common import Scored, device
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
            "unsupported_reason": self.unsupported_reason,
            "self_test": functools.partial(self_test, self.attend, write_attend),
            "write_attend": write_attend,
            "write_grain": self.write_grain,
        }

    def interpreted(self) -> "Kernels":
        """Returns the same kernels, run by the interpreter."""
        return dataclasses.replace(self, interpret=True)

    def unsupported_reason(
        self, q: Array, k: Pairs, stats: frozenset[str], scoring: Scoring
    ) -> str | None:
        """Returns why the kernels cannot take these arrays, or None."""
        if "attn_weights" in stats:
            return "no fused kernel returns all the weights"
        kind = None if self.interpret else device().kind
        if isinstance(k, Stored):
            k = jax.ShapeDtypeStruct(k.shape, k.dtype)
        return self._load().unsupported_reason(q, k, stats, kind)

    def attend(
        self, q, k, v, pos, q_pos, n, stats: frozenset[str], scoring: Scoring
    ) -> tuple[Partial, Observation]:
        """Implements `kvjax.attention.attend`."""
        k, v = self._readable(k), self._readable(v)
        found = self._run("attend", stats, scoring, q, k, v, pos, q_pos, n)
        return _to_package_types(found, n, q_pos)

    def attention_stats(
        self, q, k, pos, q_pos, n, whole: Partial, stats, scoring: Scoring
    ) -> Observation:
        """Implements `kvjax.attention.attention_stats`."""
        k = self._readable(k)
        softmax = whole.max_logit, whole.denominator
        found = self._run(
            "attention_stats", stats, scoring, q, k, pos, q_pos, n, *softmax
        )
        return Observation(num_tokens=n, positions=q_pos, **found)

    def write_attend(
        self, q, new_k, new_v, slot, k, v, pos, q_pos, n, stats, scoring: Scoring
    ) -> tuple[Partial, Observation, Array, Array]:
        """Implements `kvjax.attention.write_attend`."""
        k, v = self._readable(k), self._readable(v)
        new = new_k, new_v, slot
        found, k, v, *_ = self._run(
            "write_attend", stats, scoring, q, *new, k, v, pos, q_pos, n
        )
        return *_to_package_types(found, n, q_pos), k, v

    def write_grain(self, pairs: Pairs) -> int | None:
        """Returns the divisor of slots for a fused write; None if there is none."""
        shown = self._readable_form(pairs)
        return self._load().write_grain(shown) if shown is not None else None

    def _readable(self, pairs: Pairs) -> Array | Codes:
        """Returns keys or values for the kernels: known codes, else decoded."""
        shown = self._readable_form(pairs)
        return decoded(pairs) if shown is None else shown

    def _readable_form(self, pairs: Pairs) -> Array | Codes | None:
        """Returns the array or its known codes; None if they must be decoded."""
        if not isinstance(pairs, Stored):
            return pairs
        codes = pairs.codes
        known = codes is not None and self._load().reads(codes, pairs.shape[-1])
        return codes if known else None

    def _load(self) -> ModuleType:
        return importlib.import_module(self.module)

    def _run(self, name: str, stats: frozenset[str], scoring: Scoring, *arrays) -> Any:
        kernel = _jitted(getattr(self._load(), name))
        options = scoring._asdict()
        return kernel(*arrays, stats=stats, interpret=self.interpret, **options)


@functools.cache
def _jitted(kernel: Callable) -> Callable:
    """Wraps a kernel in `jit`, so that a program lowers it once for all layers.

    Lowering a GPU kernel takes a quarter of a second per call.
    """
    static = "stats", "interpret", *Scoring._fields
    return jax.jit(kernel, static_argnames=static)


def _to_package_types(
    found: Scored, n: Array, q_pos: Array
) -> tuple[Partial, Observation]:
    """Converts a kernel's result to the package's types."""
    return Partial(found.out, found.max_logit, found.denominator), Observation(
        num_tokens=n,
        positions=q_pos,
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
    run = jax.jit(attend, static_argnums=(6, 7))
    found, observation = run(
        *(row(q), _stored(row(k), codec), _stored(row(v), codec)),
        row(np.broadcast_to(pos, (2, slots)).astype(np.int32)),
        row(q_pos.astype(np.int32)),
        jnp.full((1,), length, jnp.int32),
        frozenset({"attn_sum"}),
        PLAIN,
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
    given = array(1, 2, 4, 1, depth), new_k, new_v, slot, k, v, zeros, one[:, None], one
    found = jax.jit(write_attend, static_argnums=(9, 10))(*given, NO_STATS, PLAIN)[2:]
    put = lambda old, new: _numbers(old).at[0, 0, 37].set(new[0, 0])
    wide = lambda x: np.asarray(_numbers(x), np.float64)
    pairs = zip(found, (put(k, new_k), put(v, new_v)), strict=True)
    return max(_largest(wide(a) - wide(b)) for a, b in pairs)


def _stored(x: Array, codec: Any) -> Pairs:
    """Encodes keys or values [B, K, C, D] with the codec, if any."""
    return x if codec is None else Stored(codec.encode(x), codec, x.shape, x.dtype)


def _numbers(pairs: Pairs | Codes) -> Array:
    """Returns the array that a fused write updates: the pairs, or their codes."""
    return numbers_of(pairs.codes if isinstance(pairs, Stored) else pairs)


def _largest(difference: np.ndarray) -> float:
    """Returns the largest absolute value; infinite if any is NaN."""
    return float(np.max(np.nan_to_num(np.abs(difference), nan=np.inf)))
