"""Masked attention on TPU that scores as it goes (Mosaic).

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
import types
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from kvjax.pallas.common import STATS, Scored, device
from kvjax.pallas.tpu_kernel import LANES, SUBLANES, SUMS, Case, Form, Pick, body
from kvjax.types import Codes, numbers_of

NAME = "kvjax_attention"  # in profiles and compiler dumps
DTYPES = (jnp.float32, jnp.bfloat16)


class Tiles(NamedTuple):
    """How much a kernel takes at a time.

    Attributes:
      pairs: bytes of K in one tile; V takes as much, and both are buffered twice.
      rows: most query rows of a KV head, R.
      vmem: bytes of VMEM that a kernel may use.
    """

    pairs: int = 2 << 20
    rows: int = 256
    vmem: int = 48 << 20


# By device kind. From the compiler's schedules (`experiments/bench_kernels.py`, see
# docs/performance.md); no device has run them.
TILES = {
    "TPU v5 lite": Tiles(),
    "TPU v6 lite": Tiles(),
    "TPU7x": Tiles(pairs=4 << 20),
}


def tiles_here() -> Tiles:
    """Those of the device that a program is traced for."""
    return TILES.get(device().kind, Tiles())


class Written(NamedTuple):
    """What `write_attend` returns.

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
    """Why the kernels cannot take these shapes and types; None where they can.

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
    need = 4 * case.heads * max(case.rows, SUBLANES) * case.tile * case.count
    if need > tiles.vmem // 3:
        return f"the weights of {case.slots} slots take {need >> 20} MiB of VMEM"
    return None


def reads(codes: Codes, depth: int) -> bool:
    """Whether the kernels take keys or values as these codes, of D channels."""
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
    """As `kvjax.attention.attend`, whose arrays these are. Empty slots may hold NaN.

    Args:
      q, k, v, pos, q_pos, n: see there; all of float32 or of bfloat16. K, and V, may be
        codes that `reads` knows.
      stats: of `common.STATS`.
      logits_soft_cap: c of c tanh(x / c) on the scaled products; 0 for none.
      local_window: tokens that a query sees, itself included; 0 for all before it.
      tiles: how much to take at a time; None is the table's.
      interpret: runs on any machine, slowly; True or `pltpu.InterpretParams`.
    """
    case = _case(q, k, v, tiles, logits_soft_cap, local_window)
    call = _products_of(case, q, k, pos, q_pos, n, stats)
    _add_values(call, case, v)
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
    """The statistics alone, of weights under a softmax that is already known.

    For segments of slots, whose weights have one normaliser in common, and for queries
    asked again. See `attend` for the arguments.
    """
    case = _case(q, k, None, tiles, logits_soft_cap, local_window)
    call = _products_of(case, q, k, pos, q_pos, n, stats)
    spare = case.parts * case.queries - q.shape[3]
    for name, known in zip(SUMS, (max_logit, denominator), strict=True):
        known = jnp.pad(known, ((0, 0), (0, 0), (0, 0), (0, spare)))
        form = "b (h k) g (i t) -> b h i 1 (k g t)"
        known = rearrange(known, form, k=case.heads, i=case.parts)
        call.inputs[name + "_in"] = (known, _sums(case)[1])
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
      tiles: how much to take at a time; None is the table's.
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
    wanted = stats | {"attn_sum"} if pick else stats
    call = _products_of(case, q, k, pos, q_pos, n, wanted)
    _add_values(call, case, v)
    _add_write(call, case, new_k, new_v, slot)
    if pick:
        _add_pick(call, case, pos, total)
    step = functools.partial(body, case=case, stats=wanted, pick=pick)
    out = call.run(step, interpret)
    scored = _scored(case, out, 1)
    return Written(
        scored=scored._replace(**dict.fromkeys(wanted - stats)),
        k=_as_stored(out["k_out"], case.k),
        v=_as_stored(out["v_out"], case.v),
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
    """How K or V lies in memory."""
    if not isinstance(pairs, Codes):
        return Form(depth, pairs.dtype.itemsize)
    width, groups = pairs.codes.shape[3], pairs.scale.shape[3]
    return Form(width, 1, groups, 8 * width // depth)


def write_grain(pairs: Array | Codes) -> int:
    """Slots that one written memory tile of K or V spans."""
    numbers = numbers_of(pairs)
    return Form(numbers.shape[3], numbers.dtype.itemsize).grain


def _as_stored(pairs: Array, form: Form) -> Array:
    """K or V as it lies in memory, or back."""
    return jnp.swapaxes(pairs, 2, 3) if form.minor else pairs


def grid(q, k, v=None, tiles: Tiles | None = None) -> tuple[int, ...]:
    """Steps of the kernel along rows, heads, queries and slots."""
    return _case(q, k, v, tiles).grid


class _Call:
    """One kernel being put together: named operands, results and scratch.

    The body gets one object that holds a ref under each name.
    """

    def __init__(self, case: Case):
        self.grid, self.vmem = case.grid, case.vmem
        self.scalars, self.inputs, self.outputs = {}, {}, {}
        self.scratch, self.aliases = {}, {}
        self.pairs = []  # operands that stay in HBM

    def run(self, body: Callable, interpret) -> dict[str, Array]:
        """Runs `body(refs)` over the grid; the results by name."""
        names = [*self.scalars, *self.inputs, *self.outputs, *self.scratch]
        operands, results = [*self.scalars, *self.inputs], list(self.outputs)
        kernel = pl.pallas_call(
            lambda *refs: body(
                types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
            ),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.scalars),
                grid=self.grid,
                in_specs=[spec for _, spec in self.inputs.values()],
                out_specs=[spec for _, spec in self.outputs.values()],
                scratch_shapes=list(self.scratch.values()),
            ),
            out_shape=[shape for shape, _ in self.outputs.values()],
            input_output_aliases={
                operands.index(old): results.index(new)
                for old, new in self.aliases.items()
            },
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", *["arbitrary"] * 3),
                vmem_limit_bytes=self.vmem,
            ),
            interpret=interpret,
            name=NAME,
        )
        arrays = {name: array for name, (array, _) in self.inputs.items()}
        if not interpret:
            arrays |= {name: _in_hbm(arrays[name]) for name in self.pairs}
        found = kernel(*self.scalars.values(), *arrays.values())
        return dict(zip(results, found, strict=True))


def _products_of(case: Case, q, k, pos, q_pos, n, stats) -> _Call:
    """Queries, keys, and the statistics of their weights."""
    spare = case.parts * case.queries - q.shape[3]
    if spare:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, spare), (0, 0)))
        q_pos = jnp.pad(q_pos, ((0, 0), (0, spare)), constant_values=-1)
    q = rearrange(q, "b k g (i t) d -> b k i (g t) d", i=case.parts)
    q_pos = rearrange(q_pos, "b (i t) -> b i t 1", i=case.parts)
    heads, rows, tile = case.heads, case.rows, case.tile
    by_group = _by_group(q, case)
    call = _Call(case)
    call.scalars = {"n": n}
    call.inputs = {
        "q": (by_group, _of_queries(case, case.depth, by_group.shape[3])),
        "q_pos": (
            q_pos,
            pl.BlockSpec((1, 1, case.queries, 1), lambda b, h, i, *_: (b, i, 0, 0)),
        ),
        "pos": (
            pos,
            pl.BlockSpec((1, case.kv_heads, tile), lambda b, h, i, c, *_: (b, 0, c)),
        ),
    }
    _add_pairs(call, case, "k", k, case.k)
    for name in sorted(stats):
        call.outputs[name] = (_f32(*pos.shape), _every_slot(case))
    call.scratch = {
        "max_logit": pltpu.VMEM((heads, rows, 1), jnp.float32),
        "denominator": pltpu.VMEM((heads, rows, 1), jnp.float32),
        "p": pltpu.VMEM((case.count, heads, rows, tile), jnp.float32),
        "base": pltpu.VMEM((case.count, heads, rows, 1), jnp.float32),
    }
    return call


def _add_values(call: _Call, case: Case, v) -> None:
    """Lets the kernel normalise the weights itself, and weigh the values."""
    heads, rows, depth = case.heads, case.rows, case.depth
    _add_pairs(call, case, "v", v, case.v)
    if case.apart(case.v):
        shape = case.v.groups * case.room, case.tile
        call.scratch["stack"] = pltpu.VMEM(shape, jnp.float32)
    call.outputs |= {
        "out": (
            _f32(case.batch, case.kv_heads, case.parts, rows, depth),
            _of_queries(case, depth),
        ),
        "max_logit_out": _sums(case),
        "denominator_out": _sums(case),
    }
    call.scratch["part"] = pltpu.VMEM((heads, rows, depth), jnp.float32)


def _add_write(call: _Call, case: Case, new_k, new_v, slot) -> None:
    """Lets the kernel write a pair: K and V become results in their own buffers."""
    call.scalars["slot"] = slot
    for name, new, form in (("k", new_k, case.k), ("v", new_v, case.v)):
        stored = call.inputs[name][0]
        new = _as_stored(new[:, :, None].astype(stored.dtype), form)
        whole = pl.BlockSpec((1, *new.shape[1:]), lambda b, *_: (b, 0, 0, 0))
        call.inputs["new_" + name] = (new, whole)
        shape = jax.ShapeDtypeStruct(stored.shape, stored.dtype)
        call.outputs[name + "_out"] = (shape, pl.BlockSpec(memory_space=pltpu.HBM))
        call.aliases[name] = name + "_out"
    call.scratch["sent"] = pltpu.SemaphoreType.DMA((2, case.heads))


def _add_pick(call: _Call, case: Case, pos, total) -> None:
    """Lets the kernel keep the totals and choose the next slot."""
    call.inputs["total"] = (total, _every_slot(case))
    call.inputs["all_pos"] = (pos, _every_slot(case))
    call.outputs["total_out"] = (_f32(*total.shape), _every_slot(case))
    call.outputs["next_slot"] = (
        jax.ShapeDtypeStruct((case.batch, case.heads, 1), jnp.int32),
        pl.BlockSpec((1, case.heads, 1), lambda b, *_: (b, 0, 0)),
    )
    call.aliases["total"] = "total_out"


def _add_pairs(call: _Call, case: Case, name: str, pairs, form: Form) -> None:
    """A tile of K or V, and of its scales."""
    coded = isinstance(pairs, Codes)
    numbers = numbers_of(pairs)
    shape = (form.width, case.tile) if form.minor else (case.tile, form.width)
    spec = pl.BlockSpec(
        (1, case.heads, *shape),
        lambda b, h, i, c, *_: (b, h, 0, c) if form.minor else (b, h, c, 0),
    )
    call.inputs[name] = (_as_stored(numbers, form), spec)
    call.pairs.append(name)
    if coded:
        scale = pl.BlockSpec(
            (1, case.heads, form.groups, case.tile),
            lambda b, h, i, c, *_: (b, h, 0, c),
        )
        call.inputs[name + "_scale"] = (jnp.swapaxes(pairs.scale, 2, 3), scale)


def _by_group(q, case: Case):
    """Query rows [..., R, D] once for every group of channels of K, zero outside.

    Each group's rows are filled up to whole tiles.
    """
    groups = case.k.groups
    if not case.apart(case.k):
        return q
    q = jnp.pad(q, [(0, 0)] * (q.ndim - 2) + [(0, case.room - case.rows), (0, 0)])
    group = jnp.arange(case.depth) // (case.depth // groups)
    own = group[None] == jnp.arange(groups)[:, None]  # [N, D]
    own = own[None, None, None, :, None]
    q = jnp.where(own, q[..., None, :, :], jnp.zeros((), q.dtype))
    return rearrange(q, "b k i n r d -> b k i (n r) d")


def _of_queries(case: Case, width: int, rows: int | None = None) -> pl.BlockSpec:
    """What a step's query rows have of an array [B, K, parts, R, width]."""
    shape = (1, case.heads, 1, rows or case.rows, width)
    return pl.BlockSpec(shape, lambda b, h, i, *_: (b, h, i, 0, 0))


def _sums(case: Case) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
    """A number per query row, along lanes: a column of them would fill 128 in HBM."""
    width = case.heads * case.rows
    block = pl.BlockSpec((1, 1, 1, 1, width), lambda b, h, i, *_: (b, h, i, 0, 0))
    return _f32(*case.grid[:3], 1, width), block


def _every_slot(case: Case) -> pl.BlockSpec:
    """All that a row has of an array [B, K, C]."""
    return pl.BlockSpec((1, case.kv_heads, case.slots), lambda b, *_: (b, 0, 0))


def _in_hbm(pairs: Array) -> Array:
    """Keeps XLA from moving a small cache into VMEM before the kernel, and back."""
    return pltpu.with_memory_space_constraint(pairs, pltpu.HBM)


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _scored(case: Case, out: dict[str, Array], length: int) -> Scored:
    """The results in their public shapes."""
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
