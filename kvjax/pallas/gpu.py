"""Attention with importance statistics on Hopper GPUs, in Pallas Mosaic GPU.

Decoding (one query per row) is one kernel: a thread block streams a head's keys and
then its values through shared memory, each byte once, and keeps the scores there in
between, so that softmax and statistics cost no traffic. A block of queries takes one
kernel with a running softmax and, where statistics are asked for, a second one that
goes over the keys again and adds up the columns with the final log-sum-exp. Both are
exact: a weight in a statistic is divided by its row's final sum.

Where keys and values are stored as codes, the codes stream through shared memory; see
`gpu_tiles`.
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from kvjax.pallas import gpu_block, gpu_tiles
from kvjax.pallas.common import HOPPER, LOWEST, STATS, Scored, device, not_hopper
from kvjax.pallas.gpu_launch import launch
from kvjax.pallas.gpu_tiles import (
    LANES,
    TILE,
    Ring,
    Source,
    tile_type,
    whole_width,
)
from kvjax.types import Codes, Scoring


class Chip(NamedTuple):
    """A GPU's resources, and the tile counts chosen for it.

    Attributes:
      processors: multiprocessors to keep busy.
      shared: bytes of shared memory of a multiprocessor that kernels may fill.
      decode: most tiles of TILE slots in flight in decoding.
      rows: tiles of keys, and of values, in flight in the pass over query rows.
      columns: tiles of query rows in flight in the pass over slots.
    """

    processors: int
    shared: int
    decode: int
    rows: int
    columns: int


class CallSpec(NamedTuple):
    """The static options of a call."""

    chip: Chip
    scoring: Scoring
    interpret: bool

    def launch(self, body, *, grid, out, scratch, **facts):
        """Returns a kernel that runs or interprets `body`; see `gpu_launch.launch`."""
        ops = gpu_tiles.Ops(self.interpret)
        body = functools.partial(body, ops=ops, scoring=self.scoring, **facts)
        return launch(
            body, grid=grid, out=out, scratch=scratch, interpret=self.interpret
        )


# By reckoning, and within 8% of the best where an H200 was asked. In decoding,
# 4.8 TB/s times a microsecond over 132 multiprocessors is 36 KB in flight on each; a
# tile is 16 KB at D = 128, and one of a ring is in use. In the other passes two tiles
# leave room for two thread blocks on a multiprocessor, which overlap one's products
# with the other's exponentials. 227 KB are there; the rest is for the compiler's
# reductions, barriers and alignment, twice.
CHIPS = dict.fromkeys(
    HOPPER, Chip(processors=132, shared=220 * 1024, decode=4, rows=2, columns=2)
)
WIDTHS = (64, 80, 96, 128, 256)  # head dims of whole swizzles; N is at most 256


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
      device_kind: as the device names itself; None is the interpreter, which takes
        everything.
    """
    group, length, width = q.shape[2:]
    if device_kind is None:
        return None
    if reason := not_hopper(device_kind):
        return reason
    if unknown := stats - set(STATS):
        return f"the GPU kernels do not add up {', '.join(sorted(unknown))}"
    if q.dtype != k.dtype:
        return f"queries are {q.dtype} and keys {k.dtype}"
    if k.dtype == jnp.float32:
        return "the tensor core would round float32 to TF32"
    if k.dtype != jnp.bfloat16:
        return f"the GPU kernels are for bfloat16, not for {k.dtype}"
    if width not in WIDTHS:
        return f"the head dimension is {width}, not one of {WIDTHS}"
    if length == 1 and group > LANES:
        return f"{group} query heads share a KV head; decoding takes at most {LANES}"
    if k.shape[2] % 8 or k.shape[2] < TILE:
        return f"the capacity {k.shape[2]} is not a multiple of 8, {TILE} or more"
    return None


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
    interpret: bool = False,
    device_kind: str | None = None,
) -> Scored:
    """Implements `kvjax.attention.attend`. Empty slots may hold NaN.

    Args:
      q, k, v, pos, q_pos, n: see there. K, and V, may be codes that `reads` knows.
      stats: of `common.STATS`.
      logits_soft_cap: c of c tanh(x / c) on the scaled products; 0 for none.
      local_window: tokens that a query sees, itself included; 0 for all before it.
      interpret: run on the CPU, float32 included. The interpreter calls back into
        Python and hangs if the caller dispatches other work before its result is ready.
      device_kind: whose tile sizes to use; None is the device's that is there.

    Raises:
      ValueError: where `unsupported_reason` gives a reason, which is the message.
    """
    scoring = Scoring(logits_soft_cap, local_window)
    spec = CallSpec(_chip(q, k, stats, device_kind, interpret), scoring, interpret)
    heads = q.shape[1]
    k, v, pos = _source(k), _source(v), _all_heads(pos)
    score = _one_query if q.shape[3] == 1 else _block_of_queries
    scored = score(q, k, v, pos, q_pos, n, stats, spec)
    split = lambda x: rearrange(x, "(b k) c -> b k c", k=heads)
    return scored._replace(
        **{name: split(getattr(scored, name)) for name in stats},
    )


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
    interpret: bool = False,
    device_kind: str | None = None,
) -> dict[str, Float[Array, "B K C"]]:
    """Computes only the statistics, under a softmax that is already known.

    For segments of slots, whose weights have one normaliser in common, and for queries
    asked again. See `attend` for the arguments.
    """
    scoring = Scoring(logits_soft_cap, local_window)
    spec = CallSpec(_chip(q, k, stats, device_kind, interpret), scoring, interpret)
    heads = q.shape[1]
    q, q_pos = _whole_tiles(q, q_pos)
    fill = ((0, 0), (0, 0), (0, 0), (0, q_pos.shape[1] - max_logit.shape[3]))
    known = (
        rearrange(jnp.pad(x, fill), "b k g t -> (b k) (g t)")
        for x in (max_logit, denominator)
    )
    k, pos = _source(k), _all_heads(pos)
    found = _sums_of_columns(q, k, pos, q_pos, n, *known, stats, spec)
    return {
        name: rearrange(x, "(b k) c -> b k c", k=heads) for name, x in found.items()
    }


def reads(codes: Codes, depth: int) -> bool:
    """Returns whether the kernels read these codes of D channels.

    Copies to shared memory are of whole 16 bytes, and so are the parts of D channels
    that lie at one place of every byte.
    """
    return codes.centre is None and codes.codes.shape[3] % 16 == 0 and depth % 16 == 0


def _source(pairs: Array | Codes) -> Source:
    """Returns keys or values with all rows' heads as their first axis."""
    if not isinstance(pairs, Codes):
        return Source(_all_heads(pairs))
    scale = rearrange(pairs.scale, "b k c n -> (b k) (c n)")
    return Source(_all_heads(pairs.codes), scale)


def _all_heads(x: Array) -> Array:
    return rearrange(x, "b k ... -> (b k) ...")


def _chip(q, k, stats, kind: str | None, interpret: bool) -> Chip:
    """Returns the device to tile for; ValueError if the kernels cannot run."""
    kind = "H200" if interpret else kind or device().kind
    if isinstance(k, Codes):  # of numbers like the queries
        shape = (*k.codes.shape[:3], q.shape[-1])
        k = jax.ShapeDtypeStruct(shape, q.dtype)
    reason = unsupported_reason(q, k, stats, None if interpret else kind)
    if reason:
        raise ValueError(reason)
    return next(chip for name, chip in CHIPS.items() if name in kind)


# --- one query per row ----------------------------------------------------------------


class Cut(NamedTuple):
    """The split of a head in decoding: segments, tiles per segment, tiles in flight."""

    segments: int
    tiles: int
    stages: int


class RingSize(NamedTuple):
    """The shared memory of decoding's ring buffers.

    Attributes:
      slot: bytes of a slot's key and value, or of one of them where they share a ring.
      wide: tiles of numbers that codes become.
    """

    slot: int
    wide: int


def _ring_size(k: Source, v: Source) -> RingSize:
    """Counts one ring if keys and values share a tile layout, else two."""
    rings = [k] if k.same_tiles(v) else [k, v]
    coded = sum(ring.scale is not None for ring in rings)
    return RingSize(sum(ring.slot_bytes for ring in rings), coded)


def cut(
    heads: int, slots: int, width: int, chip: Chip, ring_size: RingSize | None = None
) -> Cut:
    """Chooses as few segments as shared memory allows, but enough for the device.

    None is shorter than four tiles, below which the start of a thread block shows. Two
    thread blocks share a multiprocessor where there are enough of them and their scores
    leave room for it.

    Args:
      heads: KV heads of all rows.
      slots: slots of a head.
      width: the head dimension.
      chip: the device.
      ring_size: shared memory of the rings; None assumes pairs that are not coded.
    """
    count, width = -(-slots // TILE), whole_width(width)
    ring_size = ring_size or RingSize(width * 2, 0)
    stage = TILE * (ring_size.slot + 4)  # keys or values, and positions
    # Coded tiles are smaller, so more of them keep the same number of bytes in flight.
    bytes_per_row = (chip.decode - ring_size.wide) * width * 2
    deep = max(chip.decode, bytes_per_row // ring_size.slot)
    per_tile = TILE * 4 * LANES  # scores, kept for the whole segment
    fixed = LANES * (width * (2 + 4) + TILE * 2) + TILE * 4  # queries, output, weights
    fixed += ring_size.wide * TILE * width * 2
    most = (chip.shared - fixed - deep * stage) // per_tile
    spread = max(1, min(chip.processors // heads, count // 4))
    tiles = min(most, -(-count // spread))
    segments = -(-count // tiles)
    half = (chip.shared // 2 - fixed - tiles * per_tile) // stage
    shared = half >= 2 and heads * segments > chip.processors
    return Cut(segments, tiles, min(half, deep) if shared else deep)


def _one_query(q, k, v, pos, q_pos, n, stats, spec: CallSpec) -> Scored:
    """Decodes; `k`, `v` and `pos` have all rows' heads as their first axis."""
    heads, group, _, width = q.shape[1:]
    all_heads, capacity = pos.shape
    ring_size = _ring_size(k, v) if k.scale is not None or v.scale is not None else None
    count, tiles, stages = cut(all_heads, capacity, width, spec.chip, ring_size)
    lanes = jnp.pad(q[:, :, :, 0], ((0, 0), (0, 0), (0, LANES - group), (0, 0)))
    part = (jnp.arange(LANES) < group)[None] & (n > 0)[:, None]
    part = jnp.repeat(part.astype(jnp.float32) / group, heads, axis=0)
    way = "" if not stats else "attn_sum" if count == 1 else "weights"
    found_type = {
        "": None,
        "attn_sum": _f32(all_heads, capacity),
        "weights": _f32(all_heads, count * tiles * TILE, LANES),
    }
    filled, shared_ring = whole_width(width), k.same_tiles(v)
    ring = lambda source: Ring.of(source, stages, width, filled, q.dtype)
    ready = lambda source: plgpu.Barrier(
        num_arrivals=source.copies, num_barriers=stages
    )
    run = spec.launch(
        gpu_block.decode,
        tiles=tiles,
        stats=way,
        grid={"head": all_heads, "segment": count},
        out=(
            _f32(all_heads, count, group, filled),
            _f32(all_heads, count, LANES),
            _f32(all_heads, count, LANES),
            found_type[way],
        ),
        scratch={
            "q_tile": tile_type((LANES, width), q.dtype, k.swizzle(width)),
            "k_ring": ring(k),
            "v_ring": None if shared_ring else ring(v),
            "seen": plgpu.SMEM((stages, TILE), jnp.int32),
            "scores": plgpu.SMEM((tiles * TILE, LANES), jnp.float32),
            "weights": tile_type((LANES, TILE), q.dtype, v.swizzle(width)),
            "out_tile": plgpu.SMEM((LANES, filled), jnp.float32),
            "spare": plgpu.SMEM((TILE,), jnp.float32),
            "k_ready": ready(k),
            "v_ready": None if shared_ring else ready(v),
            "q_ready": plgpu.Barrier(),
            "pos_ready": plgpu.Barrier(num_barriers=stages),
        },
    )
    lanes = rearrange(lanes, "b k g d -> (b k) g d")
    now = jnp.repeat(q_pos[:, 0], heads)
    out, *sums, found = run(lanes, k, v, pos, now, part)
    softmax = [out[..., :width], *sums]
    if count == 1:
        softmax = [x[:, 0] for x in softmax]
    else:
        *softmax, found = _merge(*softmax, found, part)
    per_head = lambda x: rearrange(x[:, :group], "(b k) g ... -> b k g 1 ...", k=heads)
    scored = Scored(*map(per_head, softmax))
    if not stats:
        return scored
    weights = found[:, :capacity]
    every = dict.fromkeys(("attn_sum", "last_attn"), weights)
    every["attn_sq_sum"] = weights * weights
    return scored._replace(**{name: every[name] for name in stats})


def _merge(out, max_logit, denominator, weights, part):
    """Joins the segments of a head, each relative to its own largest logit.

    Args:
      out: [H, segments, G, D].
      max_logit: [H, segments, 8].
      denominator: [H, segments, 8].
      weights: [H, slots of all segments, 8], or None.
      part: [H, 8] what a query head counts for in the average over heads.

    Returns:
      The first three without the axis of segments, and the slots' weights [H, slots],
      averaged over query heads, or None.
    """
    top = jnp.max(max_logit, axis=1)
    fade = jnp.exp(max_logit - jnp.maximum(top, LOWEST)[:, None])  # [H, segments, 8]
    total = jnp.sum(denominator * fade, axis=1)
    out = jnp.sum(out * fade[:, :, : out.shape[2], None], axis=1)
    if weights is None:
        return out, top, total, None
    share = fade * (part / jnp.where(total > 0, total, 1.0))[:, None]
    weights = rearrange(weights, "h (s c) g -> h s c g", s=max_logit.shape[1])
    mean = jnp.sum(weights * share[:, :, None], axis=-1)
    return out, top, total, rearrange(mean, "h s c -> h (s c)")


# --- a block of queries ---------------------------------------------------------------


def _block_of_queries(q, k, v, pos, q_pos, n, stats, spec: CallSpec) -> Scored:
    """Attends with a block; `k`, `v` and `pos` lead with all rows' heads."""
    heads, group, length, width = q.shape[1:]
    all_heads, capacity = pos.shape
    q, q_pos = _whole_tiles(q, q_pos)
    gaps = jnp.pad(pos, ((0, 0), (0, -capacity % TILE)), constant_values=-1) < 0
    gaps = jnp.any(rearrange(gaps, "h (i c) -> h i c", c=TILE), axis=-1)
    stages = spec.chip.rows
    ring = lambda source: Ring.of(source, stages, width, width, q.dtype)
    run = spec.launch(
        gpu_block.rows,
        grid={"head": all_heads, "tile": q.shape[1] // TILE},
        out=(_f32(*q.shape), _f32(*q.shape[:2]), _f32(*q.shape[:2])),
        scratch={
            "q_tile": tile_type((TILE, width), q.dtype, k.swizzle(width)),
            "k_ring": ring(k),
            "v_ring": ring(v),
            "seen": plgpu.SMEM((stages, TILE), jnp.int32),
            "ready": plgpu.Barrier(
                num_arrivals=k.copies + v.copies + 1, num_barriers=stages
            ),
            "q_ready": plgpu.Barrier(),
        },
    )
    softmax = run(q, k, v, pos, q_pos, gaps.astype(jnp.int32))
    per_head = lambda x: rearrange(
        x, "(b k) (g t) ... -> b k g t ...", k=heads, g=group
    )[:, :, :, :length]
    scored = Scored(*map(per_head, softmax))
    if not stats:
        return scored
    given = (q, k, pos, q_pos, n, *softmax[1:])
    return scored._replace(**_sums_of_columns(*given, stats, spec))


def _whole_tiles(q, q_pos):
    """Pads T to whole tiles: queries [H, G * T, D] and positions [B, T].

    The queries that fill them see nothing.
    """
    pad = -q.shape[3] % TILE
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, pad), (0, 0)))
    q_pos = jnp.pad(q_pos, ((0, 0), (0, pad)), constant_values=-1)
    return rearrange(q, "b k g t d -> (b k) (g t) d"), q_pos


def _sums_of_columns(
    q, k, pos, q_pos, n, max_logit, denominator, stats, spec: CallSpec
) -> dict[str, Array]:
    """Computes the statistics [H, C] under known softmax sums [H, G * T]."""
    all_heads, capacity = pos.shape
    heads, group = all_heads // len(n), q.shape[1] // q_pos.shape[1]
    width, stages = q.shape[2], spec.chip.columns
    real = jnp.arange(q_pos.shape[1])[None] < n[:, None]
    real = jnp.tile(jnp.repeat(real, heads, axis=0), (1, group))  # [H, G * T]
    seen = real & (denominator > 0)
    lse = max_logit + jnp.log(jnp.where(seen, denominator, 1.0))
    lse = jnp.where(seen, lse, jnp.inf)
    names, swizzle = sorted(stats), k.swizzle(width)
    run = spec.launch(
        gpu_block.columns,
        grid={"head": all_heads, "tile": -(-capacity // TILE)},
        out={name: _f32(all_heads, capacity) for name in names},
        scratch={
            "k_tile": Ring.of(k, 1, width, width, q.dtype),
            "seen": plgpu.SMEM((TILE,), jnp.int32),
            "q_ring": tile_type((stages, TILE, width), q.dtype, swizzle),
            "now_ring": plgpu.SMEM((stages, TILE), jnp.int32),
            "lse_ring": plgpu.SMEM((stages, TILE), jnp.float32),
            "spare": {name: plgpu.SMEM((TILE,), jnp.float32) for name in names},
            "ready": plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            "k_ready": plgpu.Barrier(num_arrivals=k.copies + 1),
        },
    )
    return run(q, k, pos, q_pos, lse, n)


def _f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)
