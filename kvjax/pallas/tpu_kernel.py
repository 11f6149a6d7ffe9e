"""The body of the TPU attention kernel: one tile of slots, see `kvjax.pallas.tpu`.

`r` holds the refs by name. In VMEM, of this step:

    q      [1, heads, 1, R, D]    p     [tiles, tile / 128, rows, 128]  exp(s - base)
    q_pos  [1, 1, queries, 1]     base  [tiles, heads, R, 1]            largest s then
    pos    [1, K, tile]           part  [heads, R, D]                   this tile's p v
    k, v   [1, heads, tile, D]    max_logit, denominator [heads, R, 1]  so far

Every head's R query rows begin a memory tile of their own in `p`, `rows` in all.

Where codes are stored, k and v hold these, and `k_scale` and `v_scale` [1, heads, N,
tile] the scales of N groups of channels. They are whole numbers, which bfloat16 holds,
and every group's scale is taken outside of the product with it:

    q k' = sum over groups of scale * (q in the group) codes'
    p v  = sum over groups of (p * scale) codes, in the group

In decoding one product does for all groups: `q` has its rows once for every group, zero
outside, and the rows of `stack` are the weights with every group's scale. A block of
queries has no rows to spare: there the tile is scaled, unless there is but one group.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas.common import LOWEST, NEVER

LANES = 128
SUBLANES = 8
SUMS = ("max_logit", "denominator")  # of a query row; given or handed over


class Pick(NamedTuple):
    """The rule by which `write_attend` chooses the slot of the next KV pair.

    Attributes:
      mean: the victim has the lowest total weight per query that has seen it
        (Batch-Max's average attention), rather than the lowest total (H2O).
      recent: newest pairs that never go.
    """

    mean: bool
    recent: int = 0


class Form(NamedTuple):
    """The memory form of keys or of values.

    Attributes:
      width: numbers, or bytes of codes, of a slot.
      bytes: of one of them.
      groups: of channels that have a scale each; 0 where there are no codes.
      bits: of a code.
    """

    width: int
    bytes: int
    groups: int = 0
    bits: int = 0

    @property
    def minor(self) -> bool:
        """Returns whether slots are the last axis in memory."""
        return self.width % LANES > 0

    @property
    def grain(self) -> int:
        """Returns the number of slots in a memory tile that is written."""
        return LANES if self.minor else {1: 32, 2: 16, 4: 16}[self.bytes]


class Case(NamedTuple):
    """The static shapes and options of a call."""

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
    k: Form
    v: Form
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
        """Returns the number of tiles that cover the slots."""
        return pl.cdiv(self.slots, self.tile)

    def apart(self, form: Form) -> bool:
        """Returns whether query rows are repeated for every group of channels."""
        return form.groups > 1 and (self.queries == 1 or not form.minor)

    @property
    def room(self) -> int:
        """R, rounded up to whole memory tiles."""
        return pl.cdiv(self.rows, SUBLANES) * SUBLANES

    @property
    def chunks(self) -> int:
        """Vectors that span the slots of a step."""
        return pl.cdiv(self.tile, LANES)

    def rows_of(self, head: int) -> pl.Slice:
        """Returns the slice of a head's query rows among those of a step."""
        return pl.ds(head * self.room, self.rows)


def body(r, *, case: Case, stats, pick: Pick | None = None) -> None:
    """Processes a tile of slots for some queries of some heads of a row."""
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
            _accumulate(r, case, h, c, s, start)
        else:
            base = jnp.maximum(r.max_logit[h], LOWEST)
            _keep(r, case, h, c, jnp.exp(s - base), base)
    if attends:
        if not case.v.groups:
            _mend(r, case, c, start)
        r.out[0, :, 0] += r.part[...]
    if writes:
        _sent(r, case, b, start)

    @pl.when(c == case.count - 1)
    def _():
        if attends:
            _hand_over(r, case)
        if stats and case.queries == 1:
            _columns_of_one(r, case, stats, r.n[b])
        elif stats:
            _columns(r, case, stats, i, r.n[b])
        if pick:
            _choose(r, case, pick, b)


def _begin(r, case: Case, attends: bool) -> None:
    """Initialises the softmax sums: empty, or those of the caller."""
    if attends:
        r.max_logit[...] = jnp.full(r.max_logit.shape, -jnp.inf, jnp.float32)
        r.denominator[...] = jnp.zeros(r.denominator.shape, jnp.float32)
        r.out[...] = jnp.zeros(r.out.shape, jnp.float32)
    else:
        for name in SUMS:
            given = jnp.transpose(getattr(r, name + "_in")[0, 0, 0])
            getattr(r, name)[...] = given.reshape(case.heads, case.rows, 1)


def _hand_over(r, case: Case) -> None:
    """Stores the softmax sums as results, along lanes."""
    for name in SUMS:
        column = getattr(r, name)[...].reshape(case.heads * case.rows, 1)
        getattr(r, name + "_out")[0, 0, 0] = jnp.transpose(column)


def _positions(r, case: Case, h, start):
    """Returns positions of a head's slots in the tile, i32[1, tile]; -1 if empty."""
    pos = r.pos[0, pl.ds(r.first_head + h, 1)]
    slot = start + jax.lax.broadcasted_iota(jnp.int32, pos.shape, 1)
    return jnp.where(slot < case.slots, pos, -1)


def _scores(r, case: Case, h, start):
    """Returns a head's masked logits, f32[R, tile]; -inf where masked."""
    pos, now = _positions(r, case, h, start), r.q_pos[0, 0]  # [1, tile], [queries, 1]
    seen = (pos >= 0) & (pos <= now)
    if case.local_window:
        seen &= pos > now - case.local_window
    seen = _for_group(seen, case)
    s = _products(r, case, h) * case.depth**-0.5
    if case.logits_soft_cap:
        s = case.logits_soft_cap * jnp.tanh(s / case.logits_soft_cap)
    return jnp.where(seen, s, -jnp.inf)


def _products(r, case: Case, h):
    """Computes q k' of a head, f32[R, tile]."""
    form = case.k
    contract = ((1,), (0,)) if form.minor else ((1,), (1,))
    scale = r.k_scale[0, h].astype(jnp.float32) if form.groups else None
    tile = _numbers(r.k[0, h], case, form, scale, r.q.dtype)
    found = _dot(r.q[0, h, 0], tile, contract)
    if case.apart(form):
        parts = _of_groups(case, form)
        return sum(found[rows] * scale[g : g + 1] for g, rows in parts)
    return found * scale if form.groups == 1 else found


def _of_groups(case: Case, form: Form):
    """Lists every group's number, and its rows of the product for all groups."""
    starts = [g * case.room for g in range(form.groups)]
    return [(g, slice(start, start + case.rows)) for g, start in enumerate(starts)]


def _numbers(tile, case: Case, form: Form, scale, dtype):
    """Loads a tile of keys or values, or of their codes as integers.

    The codes of several groups that are not taken apart are scaled, [D, tile].
    """
    if not form.groups:
        return tile
    if form.bits < 8:
        parts = [_unpacked(tile, i, form.bits) for i in range(0, 8, form.bits)]
        tile = jnp.concatenate(parts, axis=0 if form.minor else 1)
    if form.groups > 1 and not case.apart(form):
        parts = jnp.split(tile.astype(jnp.float32), form.groups, axis=0)
        scaled = [part * scale[g : g + 1] for g, part in enumerate(parts)]
        tile = jnp.concatenate(scaled, axis=0)
    return tile.astype(dtype)


def _unpacked(packed, first: int, bits: int):
    """Extracts int8 codes from bytes that hold several, from bit `first` on.

    Four bytes at a time, as the vector unit has 32 bits: 128 is added to each byte
    while its offset is taken off, so that none borrows from the next.
    """
    in_each = lambda byte: jnp.int32(int.from_bytes([byte] * 4, "little", signed=True))
    words = pltpu.bitcast(packed, jnp.int32)
    words = (words >> first) & in_each(2**bits - 1)
    words = (words | in_each(128)) - in_each(2 ** (bits - 1))
    return pltpu.bitcast(words ^ in_each(128), jnp.int8)


def _accumulate(r, case: Case, h, c, s, start) -> None:
    """Updates the online softmax of a head's query rows with one tile."""
    old = r.max_logit[h]
    new = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
    base = jnp.maximum(new, LOWEST)
    p = jnp.exp(s - base)
    fade = jnp.exp(jnp.maximum(old, LOWEST) - base)
    r.max_logit[h] = new
    r.denominator[h] = r.denominator[h] * fade + jnp.sum(p, axis=1, keepdims=True)
    r.out[0, h, 0] *= fade
    if case.v.groups:
        r.part[h] = _weighted_codes(r, case, h, p, start)
    else:
        r.part[h] = _weighted(p, r.v[0, h], case)
    _keep(r, case, h, c, p, base)


def _keep(r, case: Case, h, c, p, base) -> None:
    """Stores a tile's weights and their maximum until the whole softmax is known."""
    r.base[c, h] = base
    for j in range(case.chunks):
        part = p[:, j * LANES : (j + 1) * LANES]
        r.p[c, j, case.rows_of(h), : part.shape[1]] = part


def _kept(r, case: Case, h, c):
    """Loads the stored weights, f32[R, tile]."""
    parts = [r.p[c, j, case.rows_of(h)] for j in range(case.chunks)]
    return jnp.concatenate(parts, axis=1)[:, : case.tile]


def _for_group(per_query, case: Case):
    """Repeats a mask [queries, tile] for all query heads, [R or 1, tile]."""
    if case.queries == 1:
        return per_query
    shape = (case.group, *per_query.shape)
    return jnp.broadcast_to(per_query[None], shape).reshape(case.rows, -1)


def _weighted(p, v, case: Case):
    """Computes p v, f32[R, D]."""
    contract = ((1,), (1,)) if case.v.minor else ((1,), (0,))
    return _dot(p.astype(v.dtype), v, contract)


def _weighted_codes(r, case: Case, h, p, start):
    """Computes p v, f32[R, D], from codes.

    The scales of empty slots, which may be NaN, do not count.
    """
    form, dtype = case.v, r.q.dtype
    contract = ((1,), (1,)) if form.minor else ((1,), (0,))
    live = _positions(r, case, h, start) >= 0
    scale = jnp.where(live, r.v_scale[0, h].astype(jnp.float32), 0.0)
    codes = _numbers(r.v[0, h], case, form, scale, dtype)
    if not case.apart(form):
        p = p * scale if form.groups == 1 else p
        return _dot(p.astype(dtype), codes, contract)
    for g, rows in _of_groups(case, form):
        r.stack[rows] = p * scale[g : g + 1]
    found = _dot(r.stack[...].astype(dtype), codes, contract)
    channel = jax.lax.broadcasted_iota(jnp.int32, (case.rows, case.depth), 1)
    group = channel // (case.depth // form.groups)
    own = [
        jnp.where(group == g, found[rows], 0.0) for g, rows in _of_groups(case, form)
    ]
    return functools.reduce(jnp.add, own)


def _dot(a, b, contract):
    return jax.lax.dot_general(
        a,
        b,
        (contract, ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _mend(r, case: Case, c, start) -> None:
    """Recomputes the product with the values without empty slots if it has a NaN.

    A weight of 0 does not keep out what lies in an empty slot if that is not finite.
    To mask the values always would double the work of a decode step.
    """
    broken = jnp.where(r.part[...] != r.part[...], 1.0, 0.0)

    @pl.when(jnp.max(broken) > 0)
    def _():
        for h in range(case.heads):
            live = (_positions(r, case, h, start) >= 0).astype(jnp.float32)
            if not case.v.minor:
                live = jnp.transpose(live)  # [tile, 1]
            v = r.v[0, h]
            v = jnp.where(live > 0, v, jnp.zeros((), v.dtype))
            r.part[h] = _weighted(_kept(r, case, h, c), v, case)


def _columns_of_one(r, case: Case, stats, n) -> None:
    """Computes the statistics of all slots for one query.

    Loads with a stride lay KV heads along sublanes, one query head of each at a time:
    their sum is of whole vectors then, and is written as it is.
    """
    of = [pl.ds(g, case.heads, stride=case.room) for g in range(case.group)]
    for c in range(case.count):
        for h in range(case.heads):
            share = _share(r, case, h, c, n > 0)
            r.share[case.rows_of(h)] = jnp.broadcast_to(share, (case.rows, LANES))
        shares = [r.share[at] for at in of]
        start, end = c * case.tile, min((c + 1) * case.tile, case.slots)
        for j, first in enumerate(range(start, end, LANES)):
            p = r.p.at[c, j]
            mean = sum(p[at] * share for at, share in zip(of, shares, strict=True))
            width = min(LANES, end - first)
            for name in stats:
                found = mean * mean if name == "attn_sq_sum" else mean
                getattr(r, name)[0, :, pl.ds(first, width)] = found[:, :width]


def _columns(r, case: Case, stats, i, n) -> None:
    """Adds these queries' share to a head's statistics of all slots."""
    query = i * case.queries
    query += jax.lax.broadcasted_iota(jnp.int32, (case.queries, 1), 0)
    real = _for_group(query < n, case)
    parts = {
        "attn_sum": lambda mean: mean,
        "attn_sq_sum": lambda mean: mean * mean,
        "last_attn": lambda mean: jnp.where(query == n - 1, mean, 0.0),
    }
    for c in range(case.count):
        weights = _kept(r, case, 0, c) * _share(r, case, 0, c, real)
        mean = jnp.sum(weights.reshape(case.group, case.queries, -1), axis=0)
        first = c * case.tile
        width = min(case.tile, case.slots - first)
        at = (0, pl.ds(r.first_head, 1), pl.ds(first, width))
        for name in stats:
            ref = getattr(r, name)
            new = jnp.sum(parts[name](mean), axis=0, keepdims=True)[:, :width]
            ref[at] = jnp.where(i > 0, ref[at], 0.0) + new


def _share(r, case: Case, h, c, real):
    """Returns factors that normalise a head's stored weights and average over G."""
    total, top = r.denominator[h], jnp.maximum(r.max_logit[h], LOWEST)
    share = jnp.where(real & (total > 0), 1.0 / (total * case.group), 0.0)
    return share * jnp.exp(r.base[c, h] - top)


def _puts(r, case: Case, b, start):
    """For each head, of K and V: whether, where and how its new pair is written.

    The place is one along an axis of the memory tile that is written.
    """
    both = (case.k, r.k, r.new_k, r.k_out), (case.v, r.v, r.new_v, r.v_out)
    for h in range(case.heads):
        slot = r.slot[b, h]
        here = (slot >= start) & (slot < jnp.minimum(start + case.tile, case.slots))
        for i, (form, tile, new, out) in enumerate(both):
            grain = form.grain
            first = slot & -grain  # of the memory tile
            inside = jnp.where(here, first - start, 0)
            home = jnp.where(here, first, 0)
            edge, to = (
                pl.ds(pl.multiple_of(place, grain), grain) for place in (inside, home)
            )
            if form.minor:
                edge, to = (slice(None), edge), (slice(None), to)
            else:
                edge, to = (edge, slice(None)), (to, slice(None))
            edge, to = tile.at[(0, h, *edge)], out.at[(b, h, *to)]
            copy = pltpu.make_async_copy(edge, to, r.sent.at[i, h])
            spot = slot - first, 1 if form.minor else 0
            yield here, spot, edge, new[0, h], copy


def _put(r, case: Case, b, start) -> None:
    """Writes the new KV pairs to the tile in VMEM, and starts their copy to HBM."""
    for here, spot, edge, new, copy in _puts(r, case, b, start):

        @pl.when(here)
        def _(spot=spot, edge=edge, new=new, copy=copy):
            place, axis = spot
            there = jax.lax.broadcasted_iota(jnp.int32, edge.shape, axis) == place
            edge[...] = _chosen(there, new, edge[...])
            copy.start()


def _chosen(where, new, old):
    """Computes `jnp.where`; bytes go through 32 bits, whose mask layout differs."""
    if old.dtype.itemsize > 1:
        return jnp.where(where, new, old)
    return jnp.where(where, new.astype(jnp.int32), old.astype(jnp.int32)).astype(
        old.dtype
    )


def _sent(r, case: Case, b, start) -> None:
    """Waits until the new KV pairs are in HBM."""
    for here, _, _, _, copy in _puts(r, case, b, start):
        pl.when(here)(copy.wait)


def _choose(r, case: Case, pick: Pick, b) -> None:
    """Adds the weights to the totals, and picks the slot of the next KV pair.

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
