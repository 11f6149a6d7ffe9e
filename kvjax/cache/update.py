"""The compressed KV state and its one transition: make room, append, attend, observe.

Shapes never change, so the state is carried through `lax` loops and donated. How much
each layer holds, when it evicts and by which policy is a `CacheConfig`, static.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import attention
from kvjax.cache import codecs
from kvjax.cache.config import CacheConfig
from kvjax.cache.layouts import dense
from kvjax.cache.state import OVERFLOW, KVState, next_positions
from kvjax.parallel import axes
from kvjax.policies import base
from kvjax.types import EMPTY, LayerOps, Stats, View


def step_layer(
    index: int,
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K T D"],
    v: Float[Array, "B K T D"],
    ops: LayerOps,
    state: KVState,
    *,
    made: CacheConfig,
    n: Int[Array, "B"],
    tokens: Int[Array, "B T"] | None = None,
    prompt: bool,
) -> tuple[Float[Array, "B K G T D"], KVState]:
    """One layer's transition for T new tokens, of which each row's first `n` are real.

    Algorithm 1 (Batch-Max): where a head's live pairs and the new ones would exceed the
    budget, it drops `evict` pairs; then the new pairs are appended; then the queries
    see the kept pairs and, causally, their own block; then the policy observes.

    Args:
      index: the layer.
      q: queries, before rotary positions.
      k: keys, before rotary positions.
      v: values.
      ops: the layer's functions.
      state: what the row has kept so far.
      made: what is kept, and when.
      n: real tokens per row.
      tokens: their ids; only for policies that need them.
      prompt: whether the tokens are the prompt's: schedules treat them differently.
    """
    layer, stats, error = state.layers[index], state.stats[index], state.error
    last = state.next_pos - 1
    schedule = made.schedule
    if schedule.evicts_in_prefill if prompt else schedule.evicts_in_decode:
        held = dense.live(layer)
        full = (held + n[:, None] > made.budget[index]) & (n > 0)[:, None]
        drop = jnp.where(full, schedule.evict, 0)
        rows = made.rows if q.shape[3] == 1 else q.shape[0]
        layer, stats = make_room(layer, stats, drop, last, ops.rotate, made, rows)
    positions = next_positions(state, q.shape[3])
    raw = q
    if made.rope == "true":
        q, k = ops.rotate(q), ops.rotate(k)
    else:
        q = ops.rotate(q, _slots_of_new(layer, q.shape[3]))
    layer, stats, slots, overflow = dense.claim(layer, stats, positions, n)
    needs = made.needs(prompt)
    layer, partial, seen = _attended(
        layer, q, k, v, slots, positions, n, needs, ops, made
    )
    view = _view(layer, ops.rotate, made, last + n, dense.live(layer))
    if made.policy and (prompt or schedule.evicts_in_decode):
        extra = _observed(needs, q, raw, v, tokens, ops)
        stats = made.policy.observe(stats, view, seen._replace(prompt=prompt, **extra))
    error = error | jnp.where(overflow, jnp.uint32(OVERFLOW), jnp.uint32(0))
    state = state.replace(
        layers=_set(state.layers, index, layer),
        stats=_set(state.stats, index, stats),
        error=error,
    )
    return attention.finish(partial).astype(q.dtype), state


def _attended(
    layer, q, k, v, slots, positions, n, needs, ops: LayerOps, made: CacheConfig
):
    """Writes the new pairs to their slots and attends, in one kernel where it can be.

    Returns the layer, the partial attention and the observation.
    """
    plain = made.codec is codecs.identity and made.rope == "true"
    how = needs, made.implementation, ops.scoring
    if plain and attention.fuses_write(q, layer.k, *how):
        partial, seen, keys, values = attention.write_attend(
            q,
            k[:, :, 0],
            v[:, :, 0],
            slots[..., 0],
            layer.k,
            layer.v,
            layer.pos,
            positions,
            n,
            *how,
        )
        return layer.replace(k=keys, v=values), partial, seen
    layer = dense.write(layer, made.codec, k, v, slots)
    view = _view(layer, ops.rotate, made, positions[:, -1], dense.live(layer))
    pairs = view.keys(), view.values(), layer.pos
    return layer, *attention.attend(q, *pairs, positions, n, *how)


def make_room(
    layer: dense.DenseLayer,
    stats: Stats,
    drop: Int[Array, "B K"],
    now: Int[Array, "B"],
    rotate: Callable[..., Array],
    made: CacheConfig,
    rows: int,
) -> tuple[dense.DenseLayer, Stats]:
    """Drops the `drop` least important pairs of every head of every row.

    Heads that drop any also lose what the policy would not keep at any budget. Works
    through the rows that drop anything, `rows` of them at a time, and costs next to
    nothing when there are none.
    """
    view = functools.partial(_view, rotate=rotate, made=made)
    busy = jnp.any(drop > 0, axis=1)
    if made.policy.across_heads:  # whoever asks for the others' scores must be answered
        busy = axes.any_head(busy)
    pos = _victims_gone(layer, stats, drop, busy, now, made.policy, view, rows)
    layer = layer.replace(pos=pos)
    if made.room == "reuse":
        return layer, stats
    return jax.lax.cond(
        jnp.any(drop > 0),
        lambda: dense.compact(layer, stats, layer.pos.shape[2]),
        lambda: (layer, stats),
    )


def compact(
    state: KVState,
    made: CacheConfig,
    capacity: tuple[int, ...],
    rotates: Sequence[Callable[..., Array]],
) -> KVState:
    """Shrinks (or grows) the state between prefill and decode.

    Heads that hold more than the schedule lets into decoding drop their least important
    pairs first: to the budget (`after_prefill`), or to the room that the first decoded
    token would make (`decode`). What the policy would not keep at any budget goes too.
    """
    layers, stats = [], []
    for index, (layer, stat) in enumerate(zip(state.layers, state.stats, strict=True)):
        if made.policy:
            budget, held = made.budget[index], dense.live(layer)
            if made.schedule.evicts_in_decode:
                target = jnp.where(held >= budget, budget - made.schedule.evict, held)
            else:
                target = jnp.minimum(held, budget)
            view = _view(layer, rotates[index], made, state.next_pos - 1, target)
            score = made.policy.score(stat, view)
            gone = base.evictions(score, layer.pos, held - target)
            layer = layer.replace(pos=jnp.where(gone, EMPTY, layer.pos))
        layer, stat = dense.compact(layer, stat, capacity[index])
        layers.append(layer)
        stats.append(stat)
    return state.replace(layers=tuple(layers), stats=tuple(stats))


def _victims_gone(
    layer: dense.DenseLayer,
    stats: Stats,
    drop: Int[Array, "B K"],
    busy: Bool[Array, "B"],
    now: Int[Array, "B"],
    policy: base.Policy,
    view: Callable[..., View],
    rows: int,
) -> Int[Array, "B K C"]:
    """The layer's positions with those of the victims set to empty."""
    batch = drop.shape[0]

    def choose(layer, stats, drop, now):
        seen = view(layer, now=now, keep=dense.live(layer) - drop)
        gone = base.evictions(policy.score(stats, seen), layer.pos, drop)
        return jnp.where(gone & (drop > 0)[..., None], EMPTY, layer.pos)

    if rows >= batch:
        return jax.lax.cond(
            jnp.any(busy),
            lambda: choose(layer, stats, drop, now),
            lambda: layer.pos,
        )

    def some_rows(carry):
        pos, drop, busy = carry
        chosen = jnp.argsort(~busy, stable=True)[:rows]
        held, seen = jax.tree.map(lambda leaf: leaf[chosen], (layer, stats))
        new = choose(held.replace(pos=pos[chosen]), seen, drop[chosen], now[chosen])
        done = drop.at[chosen].set(0), busy.at[chosen].set(False)
        return pos.at[chosen].set(new), *done

    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[2]), some_rows, (layer.pos, drop, busy)
    )[0]


def _view(layer, rotate, made: CacheConfig, now: Array, keep: Array) -> View:
    """What attention and policy see of a layer."""

    def keys():
        stored = made.codec.decode(layer.k)
        if made.rope == "true":
            return stored
        batch, _, capacity = layer.pos.shape
        slots = jnp.arange(capacity, dtype=jnp.int32)[None]
        return rotate(stored, jnp.broadcast_to(slots, (batch, capacity)))

    return View(
        pos=layer.pos,
        now=now,
        keep=keep,
        keys=keys,
        values=lambda: made.codec.decode(layer.v),
        rotate=rotate,
    )


def _slots_of_new(layer: dense.DenseLayer, count: int) -> Int[Array, "B K T"]:
    """The slots that the next `count` pairs of an ordered layer will take."""
    return dense.live(layer)[..., None] + jnp.arange(count, dtype=jnp.int32)[None, None]


def _observed(needs, q, raw, v, tokens, ops: LayerOps) -> dict[str, Array]:
    """The parts of an observation that attention does not know."""

    def output_norm():
        added = jnp.abs(ops.project(v).astype(jnp.float32))
        return jnp.mean(jnp.sum(added, axis=-1), axis=2)

    known = {
        "queries": lambda: q,
        "raw_queries": lambda: raw,
        "output_norm": output_norm,
        "tokens": lambda: tokens,
    }
    return {name: known[name]() for name in needs & known.keys()}


def _set(items: tuple, index: int, item) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
