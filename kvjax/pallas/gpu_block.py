"""What one thread block does: the three kernels of `gpu`, in Pallas Mosaic GPU.

Each is one warpgroup that streams tiles from device memory through a ring of buffers in
shared memory, with `H` KV heads (of all rows) on the grid. There is no producer
warpgroup: a slot of the ring is refilled as soon as its tile is used up, and two or
more thread blocks share a multiprocessor.
"""

import dataclasses
import inspect

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from kvjax.pallas.common import LOWEST
from kvjax.types import Scoring

TILE = 64  # slots, or query rows, per step: the M of one tensor-core instruction
LANES = 8  # query heads of a KV head in decoding, padded to the narrowest N

# Older loads want an index of their own, besides the view's.
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_NO_INDEX = ((),) if _INDEX and _INDEX.default is inspect.Parameter.empty else ()

# How the tensor core spreads a tile's rows, and its columns, over the threads.
ROWS, COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Ops:
    """What the hardware and the interpreter spell differently, and nothing else."""

    interpret: bool

    def load(self, ref, *index, layout=plgpu.Layout.WGMMA, swizzled=False):
        """A tile in registers, spread over the threads as the tensor core wants it."""
        if self.interpret:
            return ref[index or ...]
        ref = ref.at[index] if index else ref
        return plgpu.load(ref, *_NO_INDEX, layout=layout, optimized=swizzled)

    def store(self, ref, tile, swizzled=False):
        """ref[...] = tile, in however small pieces (0.12 refuses them unasked)."""
        if self.interpret or not hasattr(plgpu, "store"):
            ref[...] = tile
        else:
            plgpu.store(ref, tile, optimized=swizzled)

    def full(self, shape, value, layout=plgpu.Layout.WGMMA):
        tile = jnp.full(shape, value, jnp.float32)
        return tile if self.interpret else plgpu.layout_cast(tile, layout)

    def iota(self, shape, axis):
        if self.interpret:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def store_transposed(self, ref, tile, swizzled=False):
        """ref[...] = tile.T, with `tile` in registers."""
        if self.interpret:
            ref[...] = tile.T
        else:
            tile = plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
            self.store(ref.T, tile, swizzled)

    def product(self, a, b, acc=None, *, flip_a=False, flip_b=False):
        """a @ b (+ acc) in float32; `flip` takes an operand's transpose, in place."""
        if self.interpret:
            a = a if isinstance(a, jax.Array) else a[...]
            out = jnp.dot(
                a.T if flip_a else a,
                b[...].T if flip_b else b[...],
                preferred_element_type=jnp.float32,
                precision=jax.lax.Precision.HIGHEST,
            )
            return out if acc is None else acc + out
        a, b = a.T if flip_a else a, b.T if flip_b else b
        if acc is not None:
            return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))

        def multiply(ref):
            plgpu.wgmma(ref, a, b)
            return ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def swizzle_of(width):
    """Bytes of the widest swizzle whose pieces a bfloat16 row of `width` is made of.

    The interpreter, which takes rows that no swizzle divides, does not swizzle.
    """
    return next((size for size in (128, 64) if 2 * width % size == 0), 32)


def whole_width(width):
    """The head dim filled up to the tensor core's M, in shared memory alone.

    Copies bring zeros for what lies past the end of a row, without reading it.
    """
    return -(-width // TILE) * TILE


def tile_type(shape, dtype, swizzle):
    """Shared memory for operands of the tensor core; those of a product swizzle alike.

    The interpreter's float32 tiles ignore it.
    """
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(
        shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle))
    )


def rows_of(tile):
    """The slice that tile number `tile` takes."""
    return pl.ds(pl.multiple_of(tile * TILE, TILE), TILE)


def fetch(source, target, barrier):
    """Starts a copy to shared memory; past the end of a dimension it brings zeros."""
    zeros = plgpu.OOBFillMode.ZEROS
    plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=zeros)


def spread(x, shape, axis):
    """A vector along `axis` of `shape`."""
    return jax.lax.broadcast_in_dim(x, shape, (axis,))


def stream(begin, end, refill, ready, step, carry):
    """carry = step(i, slot, carry) for the tiles begin to end of a ring of buffers.

    Tile i lies in slot i % stages once its barrier opens; then the slot is refilled.
    """
    stages = ready.shape[0]

    def body(i, carry):
        slot = jax.lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(ready.at[slot])
        carry = step(i, slot, carry)
        plgpu.commit_smem()  # all have read the slot before copies overwrite it
        refill(i + stages, slot)
        return carry

    return jax.lax.fori_loop(jnp.int32(begin), jnp.int32(end), body, carry)


def clear(ops, tile, weight):
    """Zeroes the rows of a tile of values that have no weight: they may hold NaN."""
    held = ops.load(tile, swizzled=True)
    kept = spread(weight, tile.shape, 0) > 0
    tile[...] = jnp.where(kept, held, jnp.zeros((), held.dtype))
    plgpu.commit_smem()


def publish(ops, vector, out, tile, spare):
    """out[the tile's slots] = vector, and not beyond the last slot.

    Neither a store nor a contiguous copy is clipped there, so the last tile takes the
    way over shared memory, whose slices may be of any size.
    """
    whole, rest = divmod(out.shape[0], TILE)

    @pl.when(tile < whole)
    def _():
        ops.store(out.at[rows_of(tile)], vector)

    if rest:

        @pl.when(tile == whole)
        def _():
            ops.store(spare, vector)
            plgpu.commit_smem()
            end = out.at[pl.ds(whole * TILE, rest)]
            plgpu.copy_smem_to_gmem(spare.at[pl.ds(0, rest)], end)


def visible(seen_from, now, scoring: Scoring):
    """Which slots a query sees: live ones, not after it, and in its window if any."""
    seen = (seen_from >= 0) & (seen_from <= now)
    if not scoring.local_window:
        return seen
    return seen & (seen_from > now - scoring.local_window)


def scaled(products, width, scoring: Scoring):
    """Scores of the products q . k, capped by c tanh(x / c) where there is a c.

    tanh(x) = 1 - 2 / (exp(2 x) + 1): the device's own is right to three digits only.
    """
    s = products * width**-0.5
    cap = scoring.logits_soft_cap
    return cap - 2 * cap / (jnp.exp(s * (2 / cap)) + 1) if cap else s


def decode(
    q,  # [H, 8, D]
    k,  # [H, C, D]
    v,  # [H, C, D]
    pos,  # [H, C]
    now,  # [H] the query's position
    part,  # [H, 8] what a query head counts for in the average over heads
    out,  # [H, segments, G, W]: W is D filled up, what lies beyond D is not to be read
    max_logit,  # [H, segments, 8]
    denominator,  # [H, segments, 8]
    found,  # "attn_sum" [H, C], or "weights" [H, slots of all segments, 8]
    *,
    ops: Ops,
    scoring: Scoring,
    tiles: int,  # per segment
    stats: str,  # "", "attn_sum" or "weights"
    q_tile,  # [8, D]
    ring,  # [stages, TILE, W]
    seen,  # i32[stages, TILE]
    scores,  # [segment, 8]
    weights,  # [8, TILE]
    out_tile,  # [8, W]
    spare,  # [TILE]
    ready,
    q_ready,
    pos_ready,
):
    """One query per row: keys, softmax over shared memory, values; unnormalised."""
    head, segment = jax.lax.axis_index("head"), jax.lax.axis_index("segment")
    present = now[head]  # read once, not for every tile
    first = segment * tiles
    width, capacity = q_tile.shape[1], k.shape[1]
    shape = (TILE, LANES)
    across = pl.ds(jnp.int32(0), ring.shape[2])  # W, past the end of D

    def refill(i, slot):
        """Tile i of the segment: its keys, and after all keys its values."""

        @pl.when(i < tiles)
        def _():
            here = (head, rows_of(first + i))
            fetch(k.at[(*here, across)], ring.at[slot], ready.at[slot])
            fetch(pos.at[here], seen.at[slot], pos_ready.at[slot])

        @pl.when((i >= tiles) & (i < 2 * tiles))
        def _():
            here = (head, rows_of(first + i - tiles), across)
            fetch(v.at[here], ring.at[slot], ready.at[slot])

    def keys(i, slot, top):
        tile = ops.product(ring.at[slot, :, pl.ds(0, width)], q_tile, flip_b=True)
        tile = scaled(tile, width, scoring)
        plgpu.barrier_wait(pos_ready.at[slot])
        here = spread(ops.load(seen, slot, layout=ROWS), shape, 0)
        slots = ops.iota(shape, 0) + (first + i) * TILE
        live = visible(here, present, scoring) & (slots < capacity)
        tile = jnp.where(live, tile, -jnp.inf)
        ops.store(scores.at[rows_of(i)], tile)
        return jnp.maximum(top, tile)

    def exponentials(i, total):
        p = jnp.exp(ops.load(scores, rows_of(i)) - spread(base, shape, 1))
        ops.store(scores.at[rows_of(i)], p)
        return total + p

    def values(i, slot, acc):
        tile = i - tiles
        p = ops.load(scores, rows_of(tile))
        if stats == "attn_sum":
            attn_sum = jnp.sum(p * spread(share, shape, 1), axis=1)
            publish(ops, attn_sum, found.at[head], tile, spare)
        elif stats == "weights":
            ops.store(found.at[head, rows_of(first + tile)], p)
        ops.store_transposed(weights, p.astype(weights.dtype), swizzled=True)
        clear(ops, ring.at[slot], jnp.max(p, axis=1))
        return ops.product(ring.at[slot], weights, acc, flip_a=True, flip_b=True)

    fetch(q.at[head], q_tile, q_ready)
    for i in range(ring.shape[0]):
        refill(jnp.int32(i), i)
    plgpu.barrier_wait(q_ready)

    top = ops.full(shape, -jnp.inf)
    top = jnp.max(stream(0, tiles, refill, ready, keys, top), axis=0)
    base = jnp.maximum(top, LOWEST)
    total = ops.full(shape, 0.0)
    total = jax.lax.fori_loop(jnp.int32(0), jnp.int32(tiles), exponentials, total)
    total = jnp.sum(total, axis=0)
    ops.store(max_logit.at[head, segment], top)
    ops.store(denominator.at[head, segment], total)
    if stats == "attn_sum":
        known = jnp.where(total > 0, total, 1.0)
        share = ops.load(part, head, layout=COLUMNS) / known

    acc = ops.full((ring.shape[2], LANES), 0.0)
    acc = stream(tiles, 2 * tiles, refill, ready, values, acc)
    ops.store_transposed(out_tile, acc)
    plgpu.commit_smem()
    group = out.shape[2]
    plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(0, group)], out.at[head, segment])
    plgpu.wait_smem_to_gmem(0)


def rows(
    q,  # [H, G * T, D]
    k,  # [H, C, D]
    v,  # [H, C, D]
    pos,  # [H, C]
    q_pos,  # [B, T]
    gaps,  # i32[H, tiles] whether a tile has empty slots
    out,  # [H, G * T, D]
    max_logit,  # [H, G * T]
    denominator,  # [H, G * T]
    *,
    ops: Ops,
    scoring: Scoring,
    q_tile,  # [TILE, D]
    k_ring,  # [stages, TILE, D]
    v_ring,  # [stages, TILE, D]
    seen,  # i32[stages, TILE]
    ready,
    q_ready,
):
    """A tile of query rows against all slots, with a running maximum."""
    head, tile = jax.lax.axis_index("head"), jax.lax.axis_index("tile")
    capacity, width = k.shape[1:]
    row = head // jnp.int32(k.shape[0] // q_pos.shape[0])
    step_in_time = jax.lax.rem(tile, jnp.int32(q_pos.shape[1] // TILE))
    tiles = gaps.shape[1]
    shape = (TILE, TILE)

    def refill(i, slot):
        @pl.when(i < tiles)
        def _():
            here = (head, rows_of(i))
            barrier = ready.at[slot]
            fetch(k.at[here], k_ring.at[slot], barrier)
            fetch(v.at[here], v_ring.at[slot], barrier)
            fetch(pos.at[here], seen.at[slot], barrier)

    def step(i, slot, carry):
        acc, top, total = carry
        gap = gaps[head, i]  # asked for long before it is needed
        s = ops.product(q_tile, k_ring.at[slot], flip_b=True)
        s = scaled(s, width, scoring)
        here = spread(ops.load(seen, slot, layout=COLUMNS), shape, 1)
        slots = ops.iota(shape, 1) + i * TILE
        s = jnp.where(visible(here, now, scoring) & (slots < capacity), s, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(s, axis=1))
        base = jnp.maximum(higher, LOWEST)
        p = jnp.exp(s - spread(base, shape, 0))
        fade = jnp.exp(top - base)
        total = total * fade + jnp.sum(p, axis=1)
        acc = acc * spread(fade, acc.shape, 0)

        @pl.when(gap > 0)
        def _():
            here = ops.load(seen, slot, layout=ROWS)
            clear(ops, v_ring.at[slot], here + 1)

        return ops.product(p.astype(v.dtype), v_ring.at[slot], acc), higher, total

    fetch(q.at[head, rows_of(tile)], q_tile, q_ready)
    for i in range(k_ring.shape[0]):
        refill(jnp.int32(i), i)
    now = spread(ops.load(q_pos, row, rows_of(step_in_time), layout=ROWS), shape, 0)
    plgpu.barrier_wait(q_ready)
    blank = (
        ops.full((TILE, width), 0.0),
        ops.full((TILE,), -jnp.inf, ROWS),
        ops.full((TILE,), 0.0, ROWS),
    )
    acc, top, total = stream(0, tiles, refill, ready, step, blank)
    ops.store(out.at[head, rows_of(tile)], acc)
    ops.store(max_logit.at[head, rows_of(tile)], top)
    ops.store(denominator.at[head, rows_of(tile)], total)


def columns(
    q,  # [H, G * T, D]
    k,  # [H, C, D]
    pos,  # [H, C]
    q_pos,  # [B, T]
    lse,  # [H, G * T] log of each row's sum; inf for a row that does not count
    n,  # [B]
    outs,  # of each statistic: [H, C]
    *,
    ops: Ops,
    scoring: Scoring,
    k_tile,  # [TILE, D]
    seen,  # i32[TILE]
    q_ring,  # [stages, TILE, D]
    now_ring,  # i32[stages, TILE]
    lse_ring,  # [stages, TILE]
    spare,  # of each statistic: [TILE]
    ready,
    k_ready,
):
    """A tile of slots against all query rows: sums of the final weights."""
    head, tile = jax.lax.axis_index("head"), jax.lax.axis_index("tile")
    row = head // jnp.int32(k.shape[0] // q_pos.shape[0])
    real = n[row]
    blocks = q_pos.shape[1] // TILE  # of queries
    group, width = q.shape[1] // q_pos.shape[1], q.shape[2]
    shape = (TILE, TILE)  # slots, queries

    def refill(i, slot):
        """Step i: queries of block i // G, query head i % G."""

        @pl.when(i < blocks * group)
        def _():
            block = i // jnp.int32(group)
            place = rows_of(jax.lax.rem(i, jnp.int32(group)) * blocks + block)
            barrier = ready.at[slot]
            fetch(q.at[head, place], q_ring.at[slot], barrier)
            fetch(lse.at[head, place], lse_ring.at[slot], barrier)
            fetch(q_pos.at[row, rows_of(block)], now_ring.at[slot], barrier)

    def add_head(i, slot, weights):
        s = ops.product(k_tile, q_ring.at[slot], flip_b=True)
        s = scaled(s, width, scoring)
        now = spread(ops.load(now_ring, slot, layout=COLUMNS), shape, 1)
        scale = spread(ops.load(lse_ring, slot, layout=COLUMNS), shape, 1)
        s = jnp.where(visible(here, now, scoring), s, -jnp.inf)
        return weights + jnp.exp(s - scale)

    def add_block(block, sums):
        first = block * group
        blank = ops.full(shape, 0.0)
        mean = stream(first, first + group, refill, ready, add_head, blank) / group
        query = ops.iota(shape, 1) + block * TILE
        terms = {
            "attn_sum": lambda: mean,
            "attn_sq_sum": lambda: mean * mean,
            "last_attn": lambda: jnp.where(query == real - 1, mean, 0.0),
        }
        return {name: sums[name] + jnp.sum(terms[name](), axis=1) for name in sums}

    fetch(k.at[head, rows_of(tile)], k_tile, k_ready)
    fetch(pos.at[head, rows_of(tile)], seen, k_ready)
    for i in range(q_ring.shape[0]):
        refill(jnp.int32(i), i)
    plgpu.barrier_wait(k_ready)
    here = spread(ops.load(seen, layout=ROWS), shape, 0)
    totals = {name: ops.full((TILE,), 0.0, ROWS) for name in outs}
    totals = jax.lax.fori_loop(jnp.int32(0), jnp.int32(blocks), add_block, totals)
    for name, total in totals.items():
        publish(ops, total, outs[name].at[head], tile, spare[name])
    plgpu.wait_smem_to_gmem(0)
