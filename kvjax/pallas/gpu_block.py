"""The bodies of the three kernels of `gpu`, run by one thread block each.

Each is one warpgroup that streams tiles from device memory through rings of buffers in
shared memory (`gpu_tiles`), with `H` KV heads (of all rows) on the grid. There is no
producer warpgroup: a slot of a ring is refilled as soon as its tile is used up, and two
or more thread blocks share a multiprocessor. Keys and values are `Source`s, of numbers
[H, C, D] or of codes.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from kvjax.pallas.common import LOWEST
from kvjax.pallas.gpu_tiles import (
    COLUMNS,
    LANES,
    ROWS,
    TILE,
    Ops,
    Ring,
    Source,
    clear,
    fetch,
    rows_of,
    spread,
    stream,
)
from kvjax.types import Scoring


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
    """Returns the attention mask: live slots, causal, within the window if any."""
    seen = (seen_from >= 0) & (seen_from <= now)
    if not scoring.local_window:
        return seen
    return seen & (seen_from > now - scoring.local_window)


def scaled(products, depth, scoring: Scoring):
    """Computes scores from products q . k, capped by c tanh(x / c) if c is set.

    tanh(x) = 1 - 2 / (exp(2 x) + 1): the device's own is right to three digits only.
    """
    s = products * depth**-0.5
    cap = scoring.logits_soft_cap
    return cap - 2 * cap / (jnp.exp(s * (2 / cap)) + 1) if cap else s


def decode(
    q,  # [H, 8, D]
    k: Source,
    v: Source,
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
    k_ring: Ring,
    v_ring: Ring | None,  # None if values lie as keys do, and share their ring
    seen,  # i32[stages, TILE]
    scores,  # [segment, 8]
    weights,  # [8, TILE]
    out_tile,  # [8, W]
    spare,  # [TILE]
    k_ready,
    v_ready,  # None likewise
    q_ready,
    pos_ready,
):
    """Attends with one query per row: keys, softmax in shared memory, then values."""
    if v_ring is None:
        v_ring, v_ready = k_ring, k_ready
    head, segment = jax.lax.axis_index("head"), jax.lax.axis_index("segment")
    present = now[head]  # read once, not for every tile
    first = segment * tiles
    depth, capacity = q_tile.shape[1], pos.shape[1]
    shape = (TILE, LANES)

    def refill(i, slot):
        """Fetches tile i of the segment: all keys first, then values."""

        @pl.when(i < tiles)
        def _():
            k.fetch(k_ring, head, first + i, slot, k_ready.at[slot])
            here = pos.at[head, rows_of(first + i)]
            fetch(here, seen.at[slot], pos_ready.at[slot])

        @pl.when((i >= tiles) & (i < 2 * tiles))
        def _():
            v.fetch(v_ring, head, first + i - tiles, slot, v_ready.at[slot])

    def keys(i, slot, top):
        held = k_ring.numbers(ops, slot, depth).at[:, pl.ds(0, depth)]
        tile = scaled(ops.product(held, q_tile, flip_b=True), depth, scoring)
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
        weight = jnp.max(p, axis=1)
        held = v_ring.numbers(ops, slot, depth, weight)
        if v.scale is None:
            clear(ops, held, weight)
        return ops.product(held, weights, acc, flip_a=True, flip_b=True)

    fetch(q.at[head], q_tile, q_ready)
    for i in range(k_ring.tiles.shape[0]):
        refill(jnp.int32(i), i)
    plgpu.barrier_wait(q_ready)

    top = ops.full(shape, -jnp.inf)
    top = jnp.max(stream(0, tiles, refill, k_ready, keys, top), axis=0)
    base = jnp.maximum(top, LOWEST)
    total = ops.full(shape, 0.0)
    total = jax.lax.fori_loop(jnp.int32(0), jnp.int32(tiles), exponentials, total)
    total = jnp.sum(total, axis=0)
    ops.store(max_logit.at[head, segment], top)
    ops.store(denominator.at[head, segment], total)
    if stats == "attn_sum":
        known = jnp.where(total > 0, total, 1.0)
        share = ops.load(part, head, layout=COLUMNS) / known

    acc = ops.full((out_tile.shape[1], LANES), 0.0)
    acc = stream(tiles, 2 * tiles, refill, v_ready, values, acc)
    ops.store_transposed(out_tile, acc)
    plgpu.commit_smem()
    group = out.shape[2]
    plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(0, group)], out.at[head, segment])
    plgpu.wait_smem_to_gmem(0)


def rows(
    q,  # [H, G * T, D]
    k: Source,
    v: Source,
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
    k_ring: Ring,
    v_ring: Ring,
    seen,  # i32[stages, TILE]
    ready,
    q_ready,
):
    """Attends with a tile of query rows to all slots, with an online softmax."""
    head, tile = jax.lax.axis_index("head"), jax.lax.axis_index("tile")
    capacity, depth = pos.shape[1], q.shape[2]
    row = head // jnp.int32(pos.shape[0] // q_pos.shape[0])
    step_in_time = jax.lax.rem(tile, jnp.int32(q_pos.shape[1] // TILE))
    tiles = gaps.shape[1]
    shape = (TILE, TILE)

    def refill(i, slot):
        @pl.when(i < tiles)
        def _():
            barrier = ready.at[slot]
            k.fetch(k_ring, head, i, slot, barrier)
            v.fetch(v_ring, head, i, slot, barrier)
            fetch(pos.at[head, rows_of(i)], seen.at[slot], barrier)

    def step(i, slot, carry):
        acc, top, total = carry
        gap = gaps[head, i]  # asked for long before it is needed
        s = ops.product(q_tile, k_ring.numbers(ops, slot, depth), flip_b=True)
        s = scaled(s, depth, scoring)
        here = spread(ops.load(seen, slot, layout=COLUMNS), shape, 1)
        slots = ops.iota(shape, 1) + i * TILE
        s = jnp.where(visible(here, now, scoring) & (slots < capacity), s, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(s, axis=1))
        base = jnp.maximum(higher, LOWEST)
        p = jnp.exp(s - spread(base, shape, 0))
        fade = jnp.exp(top - base)
        total = total * fade + jnp.sum(p, axis=1)
        acc = acc * spread(fade, acc.shape, 0)

        coded = v.scale is not None
        weight = ops.load(seen, slot, layout=ROWS) + 1 if coded else None
        held = v_ring.numbers(ops, slot, depth, weight)
        if not coded:

            @pl.when(gap > 0)
            def _():
                clear(ops, held, ops.load(seen, slot, layout=ROWS) + 1)

        return ops.product(p.astype(q_tile.dtype), held, acc), higher, total

    fetch(q.at[head, rows_of(tile)], q_tile, q_ready)
    for i in range(k_ring.tiles.shape[0]):
        refill(jnp.int32(i), i)
    now = spread(ops.load(q_pos, row, rows_of(step_in_time), layout=ROWS), shape, 0)
    plgpu.barrier_wait(q_ready)
    blank = (
        ops.full((TILE, depth), 0.0),
        ops.full((TILE,), -jnp.inf, ROWS),
        ops.full((TILE,), 0.0, ROWS),
    )
    acc, top, total = stream(0, tiles, refill, ready, step, blank)
    ops.store(out.at[head, rows_of(tile)], acc)
    ops.store(max_logit.at[head, rows_of(tile)], top)
    ops.store(denominator.at[head, rows_of(tile)], total)


def columns(
    q,  # [H, G * T, D]
    k: Source,
    pos,  # [H, C]
    q_pos,  # [B, T]
    lse,  # [H, G * T] log of each row's sum; inf for a row that does not count
    n,  # [B]
    outs,  # of each statistic: [H, C]
    *,
    ops: Ops,
    scoring: Scoring,
    k_tile: Ring,  # of one buffer
    seen,  # i32[TILE]
    q_ring,  # [stages, TILE, D]
    now_ring,  # i32[stages, TILE]
    lse_ring,  # [stages, TILE]
    spare,  # of each statistic: [TILE]
    ready,
    k_ready,
):
    """Sums the final weights of all query rows for a tile of slots."""
    head, tile = jax.lax.axis_index("head"), jax.lax.axis_index("tile")
    row = head // jnp.int32(pos.shape[0] // q_pos.shape[0])
    real = n[row]
    blocks = q_pos.shape[1] // TILE  # of queries
    group, depth = q.shape[1] // q_pos.shape[1], q.shape[2]
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
        s = ops.product(held, q_ring.at[slot], flip_b=True)
        s = scaled(s, depth, scoring)
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

    k.fetch(k_tile, head, tile, 0, k_ready)
    fetch(pos.at[head, rows_of(tile)], seen, k_ready)
    for i in range(q_ring.shape[0]):
        refill(jnp.int32(i), i)
    plgpu.barrier_wait(k_ready)
    held = k_tile.numbers(ops, 0, depth)
    here = spread(ops.load(seen, layout=ROWS), shape, 0)
    totals = {name: ops.full((TILE,), 0.0, ROWS) for name in outs}
    totals = jax.lax.fori_loop(jnp.int32(0), jnp.int32(blocks), add_block, totals)
    for name, total in totals.items():
        publish(ops, total, outs[name].at[head], tile, spare[name])
    plgpu.wait_smem_to_gmem(0)
