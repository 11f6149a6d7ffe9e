"""The body of the TPU attention kernel: one tile of slots, see `kvjax.pallas.tpu`.

`r` holds the refs by name. In VMEM, of this step:

    q      [1, heads, 1, R, D]     p     [tiles, heads, R, tile]  unnormalised weights
    q_pos  [1, 1, queries, 1]      base  [tiles, heads, R, 1]     what they are based on
    pos    [1, K, tile]            part  [heads, R, D]            this tile's p v
    k, v   [1, heads, tile, D]     max_logit, denominator [heads, R, 1], so far
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas.common import LOWEST, NEVER

LANES = 128
SUMS = ("max_logit", "denominator")  # of a query row; given or handed over


class Pick(NamedTuple):
    """How `write_attend` chooses where the next pair goes.

    Attributes:
      mean: the victim has the lowest total weight per query that has seen it
        (Batch-Max's average attention), rather than the lowest total (H2O).
      recent: newest pairs that never go.
    """

    mean: bool
    recent: int = 0


class Case(NamedTuple):
    """Static facts of one call."""

    batch: int
    kv_heads: int
    group: int
    queries: int  # of a part, for every query head
    parts: int
    slots: int
    depth: int
    heads: int  # KV heads of a step
    tile: int  # slots of a step
    vmem: int
    logits_soft_cap: float = 0.0
    local_window: int = 0

    @property
    def grid(self) -> tuple[int, ...]:
        return self.batch, self.kv_heads // self.heads, self.parts, self.count

    @property
    def rows(self) -> int:
        return self.group * self.queries

    @property
    def count(self) -> int:
        """Tiles that cover the slots."""
        return pl.cdiv(self.slots, self.tile)

    @property
    def minor(self) -> bool:
        """Whether slots are the last axis of K and V in memory."""
        return self.depth % LANES > 0


def write_grain(depth: int) -> int:
    """Slots that one written memory tile spans, for head dim `depth`."""
    return LANES if depth % LANES else 16


def body(r, *, case: Case, stats, pick: Pick | None = None) -> None:
    """One tile of slots for some queries of some heads of a row."""
    b, g, i, c = (pl.program_id(axis) for axis in range(4))
    r.first_head = 0 if case.heads == case.kv_heads else g * case.heads
    start = c * case.tile
    attends, writes = hasattr(r, "v"), hasattr(r, "slot")
    if writes:
        _put(r, case, b, start)

    @pl.when(c == 0)
    def _():
        _begin(r, case, attends)

    for h in range(case.heads):
        s = _scores(r, case, h, start)
        if attends:
            _accumulate(r, case, h, c, s)
        else:
            r.base[c, h] = jnp.maximum(r.max_logit[h], LOWEST)
            r.p[c, h] = jnp.exp(s - r.base[c, h])
    if attends:
        _mend(r, case, c, start)
        r.out[0, :, 0] += r.part[...]
    if writes:
        _sent(r, case, b, start)

    @pl.when(c == case.count - 1)
    def _():
        if attends:
            _hand_over(r, case)
        if stats:
            _columns(r, case, stats, i, r.n[b])
        if pick:
            _choose(r, case, pick, b)


def _begin(r, case: Case, attends: bool) -> None:
    """Empty sums, or those that are given."""
    if attends:
        r.max_logit[...] = jnp.full(r.max_logit.shape, -jnp.inf, jnp.float32)
        r.denominator[...] = jnp.zeros(r.denominator.shape, jnp.float32)
        r.out[...] = jnp.zeros(r.out.shape, jnp.float32)
    else:
        for name in SUMS:
            given = jnp.transpose(getattr(r, name + "_in")[0, 0, 0])
            getattr(r, name)[...] = given.reshape(case.heads, case.rows, 1)


def _hand_over(r, case: Case) -> None:
    """The sums as results, along lanes."""
    for name in SUMS:
        column = getattr(r, name)[...].reshape(case.heads * case.rows, 1)
        getattr(r, name + "_out")[0, 0, 0] = jnp.transpose(column)


def _positions(r, case: Case, h, start):
    """The positions of a head's slots in the tile, i32[1, tile]; -1 if empty."""
    pos = r.pos[0, pl.ds(r.first_head + h, 1)]
    slot = start + jax.lax.broadcasted_iota(jnp.int32, pos.shape, 1)
    return jnp.where(slot < case.slots, pos, -1)


def _scores(r, case: Case, h, start):
    """Scaled products of a head, f32[R, tile]; -inf where a query sees no pair."""
    pos, now = _positions(r, case, h, start), r.q_pos[0, 0]  # [1, tile], [queries, 1]
    seen = (pos >= 0) & (pos <= now)
    if case.local_window:
        seen &= pos > now - case.local_window
    seen = _for_group(seen, case)
    contract = ((1,), (0,)) if case.minor else ((1,), (1,))
    s = _dot(r.q[0, h, 0], r.k[0, h], contract) * case.depth**-0.5
    if case.logits_soft_cap:
        s = case.logits_soft_cap * jnp.tanh(s / case.logits_soft_cap)
    return jnp.where(seen, s, -jnp.inf)


def _accumulate(r, case: Case, h, c, s) -> None:
    """One tile of the online softmax of a head's query rows."""
    old = r.max_logit[h]
    new = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
    base = jnp.maximum(new, LOWEST)
    p = jnp.exp(s - base)
    fade = jnp.exp(jnp.maximum(old, LOWEST) - base)
    r.max_logit[h] = new
    r.denominator[h] = r.denominator[h] * fade + jnp.sum(p, axis=1, keepdims=True)
    r.out[0, h, 0] *= fade
    r.part[h] = _weighted(p, r.v[0, h], case)
    r.p[c, h] = p
    r.base[c, h] = base


def _for_group(per_query, case: Case):
    """A mask [queries, tile] for the rows of all query heads, [R or 1, tile]."""
    if case.queries == 1:
        return per_query
    shape = (case.group, *per_query.shape)
    return jnp.broadcast_to(per_query[None], shape).reshape(case.rows, -1)


def _weighted(p, v, case: Case):
    """p v, f32[R, D]."""
    contract = ((1,), (1,)) if case.minor else ((1,), (0,))
    return _dot(p.astype(v.dtype), v, contract)


def _dot(a, b, contract):
    return jax.lax.dot_general(
        a,
        b,
        (contract, ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _mend(r, case: Case, c, start) -> None:
    """Takes the product with the values again, without empty slots, if one was NaN.

    A weight of 0 does not keep out what lies in an empty slot if that is not finite.
    To mask the values always would double the work of a decode step.
    """
    broken = jnp.where(r.part[...] != r.part[...], 1.0, 0.0)

    @pl.when(jnp.max(broken) > 0)
    def _():
        for h in range(case.heads):
            live = (_positions(r, case, h, start) >= 0).astype(jnp.float32)
            if not case.minor:
                live = jnp.transpose(live)  # [tile, 1]
            v = r.v[0, h]
            v = jnp.where(live > 0, v, jnp.zeros((), v.dtype))
            r.part[h] = _weighted(r.p[c, h], v, case)


def _columns(r, case: Case, stats, i, n) -> None:
    """Adds these queries' part to the statistics of all slots."""
    query = i * case.queries
    query += jax.lax.broadcasted_iota(jnp.int32, (case.queries, 1), 0)
    real = _for_group(query < n, case)
    parts = {
        "attn_sum": lambda mean: mean,
        "attn_sq_sum": lambda mean: mean * mean,
        "last_attn": lambda mean: jnp.where(query == n - 1, mean, 0.0),
    }
    for h in range(case.heads):
        total, top = r.denominator[h], jnp.maximum(r.max_logit[h], LOWEST)
        share = jnp.where(real & (total > 0), 1.0 / (total * case.group), 0.0)
        for c in range(case.count):
            mean = _group_sum(r.p[c, h] * (share * jnp.exp(r.base[c, h] - top)), case)
            first = c * case.tile
            width = min(case.tile, case.slots - first)
            at = (0, pl.ds(r.first_head + h, 1), pl.ds(first, width))
            for name in stats:
                ref = getattr(r, name)
                new = jnp.sum(parts[name](mean), axis=0, keepdims=True)[:, :width]
                ref[at] = jnp.where(i > 0, ref[at], 0.0) + new


def _group_sum(weights, case: Case):
    """Sums over a KV head's query heads, f32[queries, tile]."""
    if case.queries == 1:
        return jnp.sum(weights, axis=0, keepdims=True)
    return jnp.sum(weights.reshape(case.group, case.queries, -1), axis=0)


def _puts(r, case: Case, b, start):
    """For each head, of K and V: whether, where and how its new pair is written."""
    grain = write_grain(case.depth)
    for h in range(case.heads):
        slot = r.slot[b, h]
        here = (slot >= start) & (slot < jnp.minimum(start + case.tile, case.slots))
        first = slot & -grain  # of the memory tile
        inside = pl.ds(pl.multiple_of(jnp.where(here, first - start, 0), grain), grain)
        home = pl.ds(pl.multiple_of(jnp.where(here, first, 0), grain), grain)
        pair = lambda slots: (
            (slice(None), slots) if case.minor else (slots, slice(None))
        )
        for i, (tile, new, out) in enumerate(
            ((r.k, r.new_k, r.k_out), (r.v, r.new_v, r.v_out))
        ):
            edge = tile.at[(0, h, *pair(inside))]
            to = out.at[(b, h, *pair(home))]
            copy = pltpu.make_async_copy(edge, to, r.sent.at[i, h])
            yield here, slot - first, edge, new[0, h], copy


def _put(r, case: Case, b, start) -> None:
    """Puts the new pairs into the tile in VMEM, and sends them on to HBM."""
    for here, place, edge, new, copy in _puts(r, case, b, start):

        @pl.when(here)
        def _(place=place, edge=edge, new=new, copy=copy):
            axis = 1 if case.minor else 0
            spot = jax.lax.broadcasted_iota(jnp.int32, edge.shape, axis) == place
            edge[...] = jnp.where(spot, new, edge[...])
            copy.start()


def _sent(r, case: Case, b, start) -> None:
    """Waits until the new pairs are in HBM."""
    for here, _, _, _, copy in _puts(r, case, b, start):
        pl.when(here)(copy.wait)


def _choose(r, case: Case, pick: Pick, b) -> None:
    """Adds the weights to the totals, and picks where the next pair goes.

    Ties give up the older pair, as `kvjax.policies.select_evictions` does.
    """
    pos, now = r.all_pos[0], r.q_pos[0, 0]
    slot = jax.lax.broadcasted_iota(jnp.int32, pos.shape, 1)
    for h in range(case.heads):
        own = (0, slice(h, h + 1))
        old = jnp.where(slot[h : h + 1] == r.slot[b, h], 0.0, r.total[own])
        r.total_out[own] = old + r.attn_sum[own]
    score = r.total_out[0]
    if pick.mean:
        score = score / (now + 1 - pos).astype(jnp.float32)
    score = jnp.where(pos > now - pick.recent, jnp.inf, score)
    score = jnp.where(pos < 0, -jnp.inf, score)
    lowest = score == jnp.min(score, axis=1, keepdims=True)
    age = jnp.where(lowest, pos, NEVER)
    oldest = age == jnp.min(age, axis=1, keepdims=True)
    chosen = jnp.where(oldest, slot, case.slots)
    r.next_slot[0] = jnp.min(chosen, axis=1, keepdims=True)
