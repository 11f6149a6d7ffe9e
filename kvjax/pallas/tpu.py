"""Masked attention on TPU with importance statistics, in Pallas Mosaic TPU.

One kernel body serves decode and prefill blocks. It reads every key and value once,
keeps the unnormalised weights of its queries in VMEM, and adds up their columns there
once the normaliser is known:

::

    for each row, heads, queries            grid (B, K / heads, parts, tiles)
      for each tile of slots                K, V stream in from HBM
        p = exp(q k' - max_logit)           [heads, R, tile], stays in VMEM
        max_logit, denominator, out         online softmax
      columns of p / denominator            the statistics of `common.STATS`

R, the query rows of a KV head, is G in decode, where a step takes all heads, and
G times some queries in a block, where it takes one head.

XLA stores TPU arrays whose last axis is not a multiple of 128 lanes with the two last
axes exchanged (measured: [B, K, C, 64] takes no padding). The kernel takes them as they
lie: for such head dims a tile is [D, slots] instead of [slots, D], and the exchange
outside is free.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Shaped

from kvjax.pallas import tpu_call
from kvjax.pallas.common import STATS, Scored, device
from kvjax.pallas.tpu_kernel import LANES, SUBLANES, SUMS, Case, Form, Pick, body
from kvjax.types import Codes, numbers_of

DTYPES = (jnp.float32, jnp.bfloat16)


class Tiles(NamedTuple):
    """The tile sizes of a kernel.

    Attributes:
      pairs: bytes of K in one tile; V takes as much, and both are buffered twice.
      rows: most query rows of a KV head, R.
      vmem: bytes of VMEM that a kernel may use.
    """

    pairs: int = 2 << 20
    rows: int = 256
    vmem: int = 48 << 20


# By device kind. From the compiler's schedules: `experiments/device/bench_kernels.py`,
# docs/performance.md. No device has run them.
TILES = {
    "TPU v5 lite": Tiles(),
    "TPU v6 lite": Tiles(),
    "TPU7x": Tiles(pairs=4 << 20),
}


def tiles_here() -> Tiles:
    """Returns the tile sizes of the device that a program is traced for."""
    return TILES.get(device().kind, Tiles())


class Written(NamedTuple):
    """The result of `write_attend`.

    Attributes:
      scored: the attention.
      k: the keys with the new ones, in the buffer of the old.
      v: the values likewise.
      total: the running totals of the weights, the new query's included.
      next_slot: where the next pair goes: the first empty slot or, where there is none,
        the victim's. Both only with `pick`.
    """

    scored: Scored
    k: Float[Array, "B K C D"]
    v: Float[Array, "B K C D"]
    total: Float[Array, "B K C"] | None = None
    next_slot: Int[Array, "B K"] | None = None


def unsupported_reason(
    q: Float[Array | jax.ShapeDtypeStruct, "B K G T D"],
    k: Float[Array | jax.ShapeDtypeStruct, "B K C D"],
    stats: frozenset[str] = frozenset(),
    device_kind: str | None = None,
) -> str | None:
    """Returns why the kernels cannot take these shapes and dtypes, or None.

    Args:
      q: queries, or anything with their shape and dtype.
      k: keys, likewise.
      stats: the statistics asked for.
      device_kind: as the device names itself; None is the interpreter.
    """
    if unknown := stats - set(STATS):
        return f"the TPU kernels do not add up {', '.join(sorted(unknown))}"
    if q.dtype != k.dtype or q.dtype not in DTYPES:
        return f"queries are {q.dtype} and keys {k.dtype}: both float32 or bfloat16"
    tiles = TILES.get(device_kind, Tiles())
    case = _case(q, k, None, tiles)
    need = 4 * case.count * case.chunks * LANES * case.heads * case.room
    if need > tiles.vmem // 3:
        return f"the weights of {case.slots} slots take {need >> 20} MiB of VMEM"
    return None


def reads(codes: Codes, depth: int) -> bool:
    """Returns whether the kernels read these codes of D channels."""
    return codes.centre is None


def attend(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K C D"] | Codes,
    v: Float[Array, "B K C D"] | Codes,
    pos: Int[Array, "B K C"],
    q_pos: Int[Array, "B T"],
    n: Int[Array, "B"],
    *,
    stats: frozenset[str] = frozenset(),
    logits_soft_cap: float = 0.0,
    local_window: int = 0,
    tiles: Tiles | None = None,
    interpret=False,
) -> Scored:
    """Implements `kvjax.attention.attend`. Empty slots may hold NaN.

    Args:
      q, k, v, pos, q_pos, n: see there; all of float32 or of bfloat16. K, and V, may be
        codes that `reads` knows.
      stats: of `common.STATS`.
      logits_soft_cap: c of c tanh(x / c) on the scaled products; 0 for none.
      local_window: tokens that a query sees, itself included; 0 for all before it.
      tiles: tile sizes; None takes the table's.
      interpret: runs on any machine, slowly; True or `pltpu.InterpretParams`.
    """
    case = _case(q, k, v, tiles, logits_soft_cap, local_window)
    call = tpu_call.of_products(case, q, k, pos, q_pos, n, stats)
    tpu_call.add_values(call, case, v)
    step = functools.partial(body, case=case, stats=stats)
    return _scored(case, call.run(step, interpret), q.shape[3])


def attention_stats(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K C D"] | Codes,
    pos: Int[Array, "B K C"],
    q_pos: Int[Array, "B T"],
    n: Int[Array, "B"],
    max_logit: Float[Array, "B K G T"],
    denominator: Float[Array, "B K G T"],
    *,
    stats: frozenset[str],
    logits_soft_cap: float = 0.0,
    local_window: int = 0,
    tiles: Tiles | None = None,
    interpret=False,
) -> dict[str, Float[Array, "B K C"]]:
    """Computes only the statistics, under a softmax that is already known.

    For segments of slots, whose weights have one normaliser in common, and for queries
    asked again. See `attend` for the arguments.
    """
    case = _case(q, k, None, tiles, logits_soft_cap, local_window)
    call = tpu_call.of_products(case, q, k, pos, q_pos, n, stats)
    spare = case.parts * case.queries - q.shape[3]
    for name, known in zip(SUMS, (max_logit, denominator), strict=True):
        known = jnp.pad(known, ((0, 0), (0, 0), (0, 0), (0, spare)))
        form = "b (h k) g (i t) -> b h i 1 (k g t)"
        known = rearrange(known, form, k=case.heads, i=case.parts)
        call.inputs[name + "_in"] = (known, tpu_call.sums(case)[1])
    step = functools.partial(body, case=case, stats=stats)
    return call.run(step, interpret)


def write_attend(
    q: Float[Array, "B K G 1 D"],
    new_k: Shaped[Array, "B K P"],
    new_v: Shaped[Array, "B K Q"],
    slot: Int[Array, "B K"],
    k: Float[Array, "B K C D"] | Codes,
    v: Float[Array, "B K C D"] | Codes,
    pos: Int[Array, "B K C"],
    q_pos: Int[Array, "B 1"],
    n: Int[Array, "B"],
    *,
    stats: frozenset[str] = frozenset(),
    total: Float[Array, "B K C"] | None = None,
    pick: Pick | None = None,
    logits_soft_cap: float = 0.0,
    local_window: int = 0,
    tiles: Tiles | None = None,
    interpret=False,
) -> Written:
    """Writes one new pair per head, attends, scores, and picks the next victim.

    Only the memory tile that holds the new pair is written back: with `k` and `v`
    donated, nothing is copied. Of codes, the scales have to be there already: codes
    alone are written and returned.

    Args:
      q: queries, see `attend`.
      new_k: the new keys, or their codes.
      new_v: the new values, or their codes.
      slot: where they go; C or more writes nothing.
      k: keys.
      v: values.
      pos: positions with the new pairs' among them.
      q_pos: position of each query.
      n: 1 for rows in use, 0 for others.
      stats: of `common.STATS`.
      total: totals of the weights so far; with `pick`.
      pick: the rule that chooses `next_slot`; None chooses none.
      logits_soft_cap: c of c tanh(x / c) on the scaled products; 0 for none.
      local_window: tokens that a query sees, itself included; 0 for all before it.
      tiles: tile sizes; None takes the table's.
      interpret: see `attend`.

    Raises:
      ValueError: C is not a multiple of `write_grain` of both.
    """
    case = _case(q, k, v, tiles, logits_soft_cap, local_window)
    grain = max(case.k.grain, case.v.grain)
    if case.slots % grain:
        raise ValueError(
            f"{case.slots} slots: a fused write needs a multiple of {grain}"
        )
    computed = stats | {"attn_sum"} if pick else stats
    call = tpu_call.of_products(case, q, k, pos, q_pos, n, computed)
    tpu_call.add_values(call, case, v)
    tpu_call.add_write(call, case, new_k, new_v, slot)
    if pick:
        tpu_call.add_pick(call, case, pos, total)
    step = functools.partial(body, case=case, stats=computed, pick=pick)
    out = call.run(step, interpret)
    scored = _scored(case, out, 1)
    return Written(
        scored=scored._replace(**dict.fromkeys(computed - stats)),
        k=tpu_call.as_stored(out["k_out"], case.k),
        v=tpu_call.as_stored(out["v_out"], case.v),
        total=out.get("total_out"),
        next_slot=out["next_slot"][..., 0] if pick else None,
    )


def _case(
    q,
    k,
    v,
    tiles: Tiles | None,
    logits_soft_cap: float = 0.0,
    local_window: int = 0,
) -> Case:
    """`v` is None where there are no values."""
    tiles = tiles or tiles_here()
    batch, kv_heads, group, length, depth = q.shape
    forms = _form(k, depth), _form(k if v is None else v, depth)
    slots = numbers_of(k).shape[2]
    if length == 1:
        queries, heads = 1, kv_heads
    else:
        most = max(tiles.rows // group // SUBLANES, 1) * SUBLANES
        queries, heads = min(most, pl.cdiv(length, SUBLANES) * SUBLANES), 1
    tile = tiles.pairs // (heads * max(form.width * form.bytes for form in forms))
    tile = slots if slots <= tile else max(tile // LANES, 1) * LANES
    parts = pl.cdiv(length, queries)
    shape = batch, kv_heads, group, queries, parts, slots, depth, heads, tile
    return Case(*shape, tiles.vmem, *forms, logits_soft_cap, local_window)


def _form(pairs: Array | Codes, depth: int) -> Form:
    """Returns the memory form of K or V."""
    if not isinstance(pairs, Codes):
        return Form(depth, pairs.dtype.itemsize)
    width, groups = pairs.codes.shape[3], pairs.scale.shape[3]
    return Form(width, 1, groups, 8 * width // depth)


def write_grain(pairs: Array | Codes) -> int:
    """Returns the number of slots in a written memory tile of K or V."""
    numbers = numbers_of(pairs)
    return Form(numbers.shape[3], numbers.dtype.itemsize).grain


def grid(q, k, v=None, tiles: Tiles | None = None) -> tuple[int, ...]:
    """Returns the grid: steps along rows, heads, queries and slots."""
    return _case(q, k, v, tiles).grid


def _scored(case: Case, out: dict[str, Array], length: int) -> Scored:
    """Returns the results in their public shapes."""
    seen = {name: out[name] for name in STATS if name in out}
    whole = rearrange(out["out"], "b k i (g t) d -> b k g (i t) d", g=case.group)
    sums = (
        rearrange(
            out[name + "_out"],
            "b h i 1 (k g t) -> b (h k) g (i t)",
            k=case.heads,
            g=case.group,
        )[..., :length]
        for name in SUMS
    )
    return Scored(whole[..., :length, :], *sums, **seen)
