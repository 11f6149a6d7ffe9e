"""The Pallas kernels in the words of the package, and the test that they work here.

Kernels take arrays and return arrays. Their compilers are imported where they are
needed, and only there.
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

TOLERATED = 0.05  # of a right answer, whose numbers are about 1 and rounded to bfloat16


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of one module, as the functions that a `Backend` is made of.

    Attributes:
      module: what holds them, by its full name.
      writes: whether decoding is to write the new pair in its kernel. It is on TPU,
        where XLA's own write at a slot that it does not know may copy the cache.
      interpret: whether they are interpreted: on any machine, slowly.
    """

    module: str
    writes: bool = False
    interpret: bool = False

    def functions(self) -> dict[str, Any]:
        """The fields of a `Backend`."""
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
        """The same, run by the interpreter."""
        return dataclasses.replace(self, interpret=True)

    def unsupported_reason(
        self, q: Array, k: Pairs, stats: frozenset[str], scoring: Scoring
    ) -> str | None:
        """Why they cannot take these arrays; None where they can."""
        if "attn_weights" in stats:
            return "no fused kernel hands over all the weights"
        kind = None if self.interpret else device().kind
        if isinstance(k, Stored):
            k = jax.ShapeDtypeStruct(k.shape, k.dtype)
        return self._load().unsupported_reason(q, k, stats, kind)

    def attend(
        self, q, k, v, pos, q_pos, n, stats: frozenset[str], scoring: Scoring
    ) -> tuple[Partial, Observation]:
        """See `kvjax.attention.attend`."""
        k, v = self._readable(k), self._readable(v)
        found = self._run("attend", stats, scoring, q, k, v, pos, q_pos, n)
        return _in_words(found, n, q_pos)

    def attention_stats(
        self, q, k, pos, q_pos, n, whole: Partial, stats, scoring: Scoring
    ) -> Observation:
        """See `kvjax.attention.attention_stats`."""
        k = self._readable(k)
        given = q, k, pos, q_pos, n, whole.max_logit, whole.denominator
        found = self._run("attention_stats", stats, scoring, *given)
        return Observation(num_tokens=n, positions=q_pos, **found)

    def write_attend(
        self, q, new_k, new_v, slot, k, v, pos, q_pos, n, stats, scoring: Scoring
    ) -> tuple[Partial, Observation, Array, Array]:
        """See `kvjax.attention.write_attend`."""
        k, v = self._readable(k), self._readable(v)
        given = q, new_k, new_v, slot, k, v, pos, q_pos, n
        found, k, v, *_ = self._run("write_attend", stats, scoring, *given)
        return *_in_words(found, n, q_pos), k, v

    def write_grain(self, pairs: Pairs) -> int | None:
        """Slots that a fused write needs a multiple of; None if it writes none such."""
        shown = self._readable_form(pairs)
        return self._load().write_grain(shown) if shown is not None else None

    def _readable(self, pairs: Pairs) -> Array | Codes:
        """Keys or values as the kernels take them: codes, where they know such."""
        shown = self._readable_form(pairs)
        return decoded(pairs) if shown is None else shown

    def _readable_form(self, pairs: Pairs) -> Array | Codes | None:
        """The arrays themselves, or their codes; None if neither can be read."""
        if not isinstance(pairs, Stored):
            return pairs
        codes = pairs.codes
        known = codes is not None and self._load().reads(codes, pairs.shape[-1])
        return codes if known else None

    def _load(self) -> ModuleType:
        return importlib.import_module(self.module)

    def _run(self, name: str, stats: frozenset[str], scoring: Scoring, *arrays) -> Any:
        kernel = _once(getattr(self._load(), name))
        options = scoring._asdict()
        return kernel(*arrays, stats=stats, interpret=self.interpret, **options)


@functools.cache
def _once(kernel: Callable) -> Callable:
    """A kernel's function that a program lowers once, however many layers call it.

    Lowering a GPU kernel takes a quarter of a second.
    """
    static = "stats", "interpret", *Scoring._fields
    return jax.jit(kernel, static_argnames=static)


def _in_words(found: Scored, n: Array, q_pos: Array) -> tuple[Partial, Observation]:
    """What a kernel returns, in the words of the package."""
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
    """What is wrong with a backend's functions here, on a small case; None if nothing.

    Args:
      attend: of a `Backend`, in bfloat16.
      write_attend: likewise; None where it has none.
      head_dim: what it is to be tried with.
      codec: the `TensorCodec` that stores keys and values; None is as they are.
    """
    wrong = max(_attend_error(attend, length, head_dim, codec) for length in (1, 24))
    if write_attend:
        wrong = max(wrong, _write_error(write_attend, head_dim, codec))
    return None if wrong < TOLERATED else f"it is {wrong:.2g} off"


def _attend_error(attend: Callable, length: int, depth: int, codec: Any) -> float:
    """The largest difference from NumPy's output and weights.

    The slots are no whole number of tiles, and the empty ones hold NaN.
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
    """How far the caches are from what they should be after a fused write."""
    draw = np.random.default_rng(1).normal
    array = lambda *shape: jnp.asarray(draw(size=shape), jnp.bfloat16)
    k, v = (_stored(x, codec) for x in array(2, 1, 2, 128, depth))
    new = [_numbers(_stored(x, codec)) for x in array(2, 1, 2, 1, depth)]
    new_k, new_v = (x[:, :, 0] for x in new)
    one, zeros = jnp.ones((1,), jnp.int32), jnp.zeros((1, 2, 128), jnp.int32)
    slot = jnp.asarray([[37, 128]], jnp.int32)  # the second head's goes nowhere
    given = array(1, 2, 4, 1, depth), new_k, new_v, slot, k, v, zeros, one[:, None], one
    found = jax.jit(write_attend, static_argnums=(9, 10))(*given, NO_STATS, PLAIN)[2:]
    put = lambda old, new: _numbers(old).at[0, 0, 37].set(new[0, 0])
    wide = lambda x: np.asarray(_numbers(x), np.float64)
    pairs = zip(found, (put(k, new_k), put(v, new_v)), strict=True)
    return max(_largest(wide(a) - wide(b)) for a, b in pairs)


def _stored(x: Array, codec: Any) -> Pairs:
    """Keys or values [B, K, C, D] as the codec stores them."""
    return x if codec is None else Stored(codec.encode(x), codec, x.shape, x.dtype)


def _numbers(pairs: Pairs | Codes) -> Array:
    """What a fused write writes: the numbers, or the codes of stored ones."""
    return numbers_of(pairs.codes if isinstance(pairs, Stored) else pairs)


def _largest(difference: np.ndarray) -> float:
    """The largest of the absolute values; infinite where one is NaN."""
    return float(np.max(np.nan_to_num(np.abs(difference), nan=np.inf)))
