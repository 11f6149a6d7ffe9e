"""Compares the attention kernels on this device with NumPy in float64.

Covers more cases than the check that kvjax runs before it uses a kernel: group sizes,
numbers of slots, head dims, prefill chunks, dtypes, single statistics, empty slots,
windows and capped scores, segments under one softmax, repeated runs, writes fused into
attention, and keys and values stored as codes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import attention
from kvjax.attention import AttentionSpec, Pairs, Queries, backends, ops
from kvjax.attention.reference import PLAIN
from kvjax.attention.stored import Stored
from kvjax.cache import codecs
from kvjax.cache.codecs import Codec
from kvjax.pallas.common import STATS
from kvjax.types import Scoring, UserError

Row = dict[str, Any]
NAMES = {"gpu": "pallas_gpu", "tpu": "pallas_tpu", "cpu": "pallas_tpu_interpret"}
# Largest error relative to max(1, largest exact value). Weights are summed in float32,
# and their scores come from a matrix unit.
ALLOWED = {"bfloat16": 2e-2, "float32": 1e-3}
ALLOWED_STATISTICS = 1e-3
FAR = 1e9  # JSON has no infinity


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention.

    Attributes:
      B, K, G, T, C, D: its shape; T = 1 is decode, T > 1 a prefill chunk.
      dtype: of queries, keys and values.
      stats: the statistics to compute.
      live: share of the slots that hold a KV pair; the others hold NaN.
      real: number of real queries of the T of a row; None draws 0 to T.
      scoring: cap and window of the scores.
      codec: name of the codec that stores keys and values; "" for none.
      way: how to call attention, a key of `WAYS`.
    """

    B: int = 2
    K: int = 2
    G: int = 4
    T: int = 1
    C: int = 328
    D: int = 128
    dtype: str = "bfloat16"
    stats: tuple[str, ...] = STATS
    live: float = 0.8
    real: int | None = None
    scoring: Scoring = PLAIN
    codec: str = ""
    way: str = "attend"

    def __str__(self):
        shape = " ".join(f"{axis}={getattr(self, axis)}" for axis in "BKGTCD")
        return f"{shape} {self.codec}".rstrip()


class Arrays(NamedTuple):
    """The arrays that `kvjax.attention.attend` takes, in NumPy or on the device."""

    q: Any
    k: Any
    v: Any
    pos: Any
    q_pos: Any
    n: Any

    def arguments(self) -> tuple[Queries, Pairs]:
        return Queries(self.q, self.q_pos, self.n), Pairs(self.k, self.v, self.pos)


def drawn(case: Case, seed: int = 0) -> Arrays:
    """Draws KV pairs in slots in random order, and queries that see some of them."""
    rng = np.random.default_rng(seed)
    kv = case.B, case.K, case.C
    shapes = (case.B, case.K, case.G, case.T, case.D), (*kv, case.D), (*kv, case.D)
    q, k, v = (np.asarray(rng.normal(size=s), jnp.dtype(case.dtype)) for s in shapes)
    pos = np.argsort(rng.random(kv), -1)
    pos[rng.random(kv) >= case.live] = -1
    k[pos < 0], v[pos < 0] = np.nan, np.nan
    start = rng.integers(case.C // 2, case.C, case.B)
    q_pos = start[:, None] + np.arange(case.T)
    most = rng.integers(0, case.T + 1, case.B)
    n = most if case.real is None else np.full(case.B, case.real)
    return Arrays(q, k, v, *(x.astype(np.int32) for x in (pos, q_pos, n)))


def stored(arrays: Arrays, codec: Codec) -> tuple[Arrays, Arrays]:
    """Returns the arrays as the codec stores them on the device, and their values."""
    tensors = codec.key, codec.value
    pairs = [jnp.asarray(x) for x in arrays[1:3]]
    both = zip(tensors, pairs, strict=True)
    coded = [Stored(t.encode(x), t, x.shape, x.dtype) for t, x in both]
    exact = [np.asarray(x.codec.decode(x.arrays, jnp.dtype("float32"))) for x in coded]
    return arrays._replace(k=coded[0], v=coded[1]), arrays._replace(
        k=exact[0], v=exact[1]
    )


def by_numpy(arrays: Arrays, scoring: Scoring = PLAIN) -> dict[str, np.ndarray]:
    """Returns output and statistics in float64; zeros where a query sees no pair."""
    live = arrays.pos >= 0
    k, v = (np.where(live[..., None], x, 0).astype(np.float64) for x in arrays[1:3])
    logits = np.einsum("bkgtd,bkcd->bkgtc", arrays.q.astype(np.float64), k)
    logits /= np.sqrt(k.shape[-1])
    if cap := scoring.logits_soft_cap:
        logits = cap * np.tanh(logits / cap)
    back = arrays.q_pos[:, None, :, None] - arrays.pos[:, :, None]  # 0: its own
    reach = scoring.local_window or np.inf
    seen = live[:, :, None] & (back >= 0) & (back < reach)
    logits = np.where(seen[:, :, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True, initial=-1e30))
    weights /= np.maximum(weights.sum(-1, keepdims=True), np.finfo(float).tiny)
    mean = weights.mean(2)  # [B, K, T, C]
    query, count = np.arange(mean.shape[2])[:, None], arrays.n[:, None, None, None]
    real = np.where(query < count, mean, 0)
    return {
        "out": np.einsum("bkgtc,bkcd->bkgtd", weights, v),
        "attn_sum": real.sum(2),
        "attn_sq_sum": (real**2).sum(2),
        "last_attn": np.where(query == count - 1, mean, 0).sum(2),
    }


# --- ways to call ---------------------------------------------------------------------


def _attend(arrays: Arrays, call: AttentionSpec) -> Row:
    return _found(*jax.jit(ops.attend)(*arrays.arguments(), call), call.stats)


def _segments(arrays: Arrays, call: AttentionSpec) -> Row:
    """Attends to the slots in two segments."""
    half = arrays.pos.shape[2] // 2 // 8 * 8

    @jax.jit
    def run(queries, pairs):
        cut = [
            Pairs(*(x[:, :, at] for x in pairs))
            for at in (slice(half), slice(half, None))
        ]
        return ops.attend_segments(queries, cut, call)

    whole, seen = run(*arrays.arguments())
    join = lambda stat: np.concatenate([getattr(each, stat) for each in seen], 2)
    return {"out": attention.normalize(whole), **{s: join(s) for s in call.stats}}


def _twice(arrays: Arrays, call: AttentionSpec) -> Row:
    """Runs the same call twice; raises ArithmeticError unless all bits agree."""
    first, second = (_attend(arrays, call) for _ in range(2))
    for what, value in first.items():
        if np.asarray(value).tobytes() != np.asarray(second[what]).tobytes():
            raise ArithmeticError(f"{what} of two equal calls differs")
    return first


def _write(arrays: Arrays, call: AttentionSpec) -> Row:
    """Writes the pair of slot 5 in the call; drops it in the last row."""
    queries, pairs = arrays.arguments()
    k, v, pos = pairs
    if not ops.fuses_write(queries, pairs, call):
        raise UserError(f"{call.implementation} leaves the write to the layout")
    slot = np.full(pos.shape[:2], 5, np.int32)
    slot[-1] = pos.shape[2]
    empty = [x.at[:-1, :, 5].set(0) for x in (k, v)]
    new = k[:, :, 5], v[:, :, 5], jnp.asarray(slot)
    run = jax.jit(ops.write_attend)
    partial, seen, *written = run(queries, Pairs(*empty, pos), *new, call)
    for what, have, want in zip("kv", written, (k, v), strict=True):
        if np.asarray(have).tobytes() != np.asarray(want).tobytes():
            raise ArithmeticError(f"{what} differs from the values to write")
    return _found(partial, seen, call.stats)


def _found(partial, seen, stats) -> Row:
    return {"out": attention.normalize(partial), **{s: getattr(seen, s) for s in stats}}


WAYS: dict[str, Callable[[Arrays, AttentionSpec], Row]] = {
    "attend": _attend,
    "segments": _segments,
    "twice": _twice,
    "write": _write,
}


# --- verdicts -------------------------------------------------------------------------


def prove(case: Case, name: str) -> Row:
    """Returns a row with a kernel's errors, and `error` if they are too large.

    `not taken` holds the reason why the kernel declines a case.
    """
    arrays, call = drawn(case), AttentionSpec(frozenset(case.stats), name, case.scoring)
    placed = arrays
    if case.codec:
        placed, arrays = stored(arrays, codecs.make(case.codec))
    placed = jax.tree.map(jnp.asarray, placed)
    row: Row = {"case": str(case), "dtype": case.dtype, "call": case.way}
    row |= {"statistics": len(case.stats), "live": case.live}
    row |= {"cap": case.scoring.logits_soft_cap, "window": case.scoring.local_window}
    try:
        backends.select_backend(*placed.arguments(), call)  # raises if it declines
        found = WAYS[case.way](placed, call)
    except UserError as error:
        return row | {"not taken": str(error)}
    except Exception as error:  # compilers and devices raise anything
        return row | {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    wanted = by_numpy(arrays, case.scoring)
    off = {what: _off(found[what], wanted[what]) for what in found}
    row["output off"] = off.pop("out")
    row["statistics off"] = max(off.values(), default=None)
    if row["output off"] > ALLOWED[case.dtype]:
        row["error"] = f"the output is {row['output off']:.2g} off"
    elif off and row["statistics off"] > ALLOWED_STATISTICS:
        row["error"] = f"{max(off, key=off.get)} is {row['statistics off']:.2g} off"
    return row


def _off(have: Any, want: np.ndarray) -> float:
    """Returns the largest error relative to the largest value; `FAR` for NaN."""
    difference = np.abs(np.asarray(have, np.float64) - want)
    scale = max(1.0, float(np.abs(want).max()))
    return min(float(np.nan_to_num(difference, nan=np.inf).max()) / scale, FAR)


# --- the cases ------------------------------------------------------------------------

BLOCK = Case(B=1, T=64)
SUBSETS = ((), ("attn_sum",), ("attn_sq_sum", "last_attn"))
CODECS = "int8", "int4", "int2", "fp8", "k8v4", "int4_rotated"
SCORINGS = Scoring(2.0, 0), Scoring(0.0, 40), Scoring(2.0, 40)
_of = dataclasses.replace


def _each(**changes) -> list[Case]:
    """Returns a decode step and a prefill chunk with these changes."""
    return [_of(base, **changes) for base in (Case(), BLOCK)]


GROUPS: dict[str, list[Case]] = {
    "decode": [
        *(Case(G=g) for g in (1, 3, 4, 8)),
        *(Case(C=c) for c in (64, 72, 2048, 8192)),
        *(Case(D=d, C=512) for d in (64, 80, 96, 256)),
        Case(B=16, K=8, C=1024),
    ],
    "prefill block": [
        *(_of(BLOCK, G=g) for g in (1, 3, 4, 8)),
        *(_of(BLOCK, T=t) for t in (100, 128, 512)),
        *(_of(BLOCK, C=c) for c in (64, 136, 2048)),
        *(_of(BLOCK, D=d, C=512) for d in (64, 80, 96, 256)),
        _of(BLOCK, B=4, K=8, C=1024),
    ],
    "statistics": [case for stats in SUBSETS for case in _each(stats=stats)],
    "empty slots": [
        *(case for live in (0.0, 0.01, 1.0) for case in _each(live=live)),
        *_each(real=0),
    ],
    "windows and caps": [
        *(case for s in SCORINGS for case in _each(scoring=s)),
        *_each(scoring=SCORINGS[-1], D=96),
        Case(scoring=SCORINGS[-1], C=8192),  # of several segments
    ],
    "codes": [
        *(case for codec in CODECS for case in _each(codec=codec)),
        *_each(codec="int4", D=64, scoring=SCORINGS[-1]),
        Case(codec="int8", C=8192),
    ],
    "float32": [*_each(dtype="float32"), *_each(dtype="float32", D=64, C=512)],
    "calls": [
        *(case for way in ("segments", "twice") for case in _each(way=way, C=776)),
        *(Case(way="write", C=c, live=1.0) for c in (128, 2048)),
    ],
}
TOY_GROUPS = {
    "decode": [Case(C=128, K=1, G=2, live=1.0, way="write")],
    "prefill block": [_of(BLOCK, K=1, G=2, T=8, C=72)],
    "windows and caps": [Case(C=72, K=1, G=2, scoring=SCORINGS[-1])],
    "codes": [Case(C=128, K=1, G=2, codec="k8v4")],
    "calls": [Case(C=128, K=1, G=2, way=way) for way in ("segments", "twice")],
}
