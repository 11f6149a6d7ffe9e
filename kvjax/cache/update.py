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
    config: CacheConfig,
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
      config: what is kept, and when.
      n: real tokens per row.
      tokens: their ids; only for policies that need them.
      prompt: whether the tokens are the prompt's: schedules treat them differently.
    """
    layer, stats, error = state.layers[index], state.stats[index], state.error
    last = state.next_pos - 1
    schedule = config.schedule
    if schedule.evicts_in_prefill if prompt else schedule.evicts_in_decode:
        held = dense.live(layer)
        full = (held + n[:, None] > config.budget[index]) & (n > 0)[:, None]
        drop = jnp.where(full, schedule.evict_size, 0)
        rows = config.rows_per_eviction if q.shape[3] == 1 else q.shape[0]
        layer, stats = make_room(layer, stats, drop, last, ops.apply_rope, config, rows)
    positions = next_positions(state, q.shape[3])
    raw = q
    if config.rope_positions == "original":
        q, k = ops.apply_rope(q), ops.apply_rope(k)
    else:
        q = ops.apply_rope(q, _slots_of_new(layer, q.shape[3]))
    layer, stats, slots, overflow = dense.claim(layer, stats, positions, n)
    needs = config.required_stats(prompt)
    layer, partial, seen = _attended(
        layer, q, k, v, slots, positions, n, needs, ops, config
    )
    view = _view(layer, ops.apply_rope, config, last + n, dense.live(layer))
    if config.policy and (prompt or schedule.evicts_in_decode):
        extra = _observed(needs, q, raw, v, tokens, ops)
        stats = config.policy.observe(
            stats, view, seen._replace(is_prefill=prompt, **extra)
        )
    error = error | jnp.where(overflow, jnp.uint32(OVERFLOW), jnp.uint32(0))
    state = state.replace(
        layers=_set(state.layers, index, layer),
        stats=_set(state.stats, index, stats),
        error=error,
    )
    return attention.normalize(partial).astype(q.dtype), state


def _attended(
    layer, q, k, v, slots, positions, n, needs, ops: LayerOps, config: CacheConfig
):
    """Writes the new pairs to their slots and attends, in one kernel where it can be.

    Returns the layer, the partial attention and the observation.
    """
    plain = config.codec is codecs.identity and config.rope_positions == "original"
    how = needs, config.implementation, ops.scoring
    if plain and attention.fuses_write(q, layer.k, *how):
        partial, seen, keys, values = attention.write_attend(
            q,
            k[:, :, 0],
            v[:, :, 0],
            slots[..., 0],
            layer.k,
            layer.v,
            layer.positions,
            positions,
            n,
            *how,
        )
        return layer.replace(k=keys, v=values), partial, seen
    layer = dense.write(layer, config.codec, k, v, slots)
    view = _view(layer, ops.apply_rope, config, positions[:, -1], dense.live(layer))
    pairs = view.keys(), view.values(), layer.positions
    return layer, *attention.attend(q, *pairs, positions, n, *how)


def make_room(
    layer: dense.DenseLayer,
    stats: Stats,
    drop: Int[Array, "B K"],
    now: Int[Array, "B"],
    rotate: Callable[..., Array],
    config: CacheConfig,
    rows: int,
) -> tuple[dense.DenseLayer, Stats]:
    """Drops the `drop` least important pairs of every head of every row.

    Heads that drop any also lose what the policy would not keep at any budget. Works
    through the rows that drop anything, `rows` of them at a time, and costs next to
    nothing when there are none.
    """
    view = functools.partial(_view, rotate=rotate, config=config)
    busy = jnp.any(drop > 0, axis=1)
    if (
        config.policy.needs_all_heads
    ):  # whoever asks for the others' scores must be answered
        busy = axes.any_head(busy)
    pos = _victims_gone(layer, stats, drop, busy, now, config.policy, view, rows)
    layer = layer.replace(positions=pos)
    if config.eviction == "in_place":
        return layer, stats
    return jax.lax.cond(
        jnp.any(drop > 0),
        lambda: dense.compact(layer, stats, layer.positions.shape[2]),
        lambda: (layer, stats),
    )


def compact(
    state: KVState,
    config: CacheConfig,
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
        if config.policy:
            budget, held = config.budget[index], dense.live(layer)
            if config.schedule.evicts_in_decode:
                target = jnp.where(
                    held >= budget, budget - config.schedule.evict_size, held
                )
            else:
                target = jnp.minimum(held, budget)
            view = _view(layer, rotates[index], config, state.next_pos - 1, target)
            score = config.policy.score(stat, view)
            gone = base.select_evictions(score, layer.positions, held - target)
            layer = layer.replace(positions=jnp.where(gone, EMPTY, layer.positions))
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
        gone = base.select_evictions(policy.score(stats, seen), layer.positions, drop)
        return jnp.where(gone & (drop > 0)[..., None], EMPTY, layer.positions)

    if rows >= batch:
        return jax.lax.cond(
            jnp.any(busy),
            lambda: choose(layer, stats, drop, now),
            lambda: layer.positions,
        )

    def some_rows(carry):
        pos, drop, busy = carry
        chosen = jnp.argsort(~busy, stable=True)[:rows]
        held, seen = jax.tree.map(lambda leaf: leaf[chosen], (layer, stats))
        new = choose(
            held.replace(positions=pos[chosen]), seen, drop[chosen], now[chosen]
        )
        done = drop.at[chosen].set(0), busy.at[chosen].set(False)
        return pos.at[chosen].set(new), *done

    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[2]), some_rows, (layer.positions, drop, busy)
    )[0]


def _view(layer, rotate, config: CacheConfig, now: Array, keep: Array) -> View:
    """What attention and policy see of a layer."""

    def keys():
        stored = config.codec.decode(layer.k)
        if config.rope_positions == "original":
            return stored
        batch, _, capacity = layer.positions.shape
        slots = jnp.arange(capacity, dtype=jnp.int32)[None]
        return rotate(stored, jnp.broadcast_to(slots, (batch, capacity)))

    return View(
        positions=layer.positions,
        query_position=now,
        num_keep=keep,
        keys=keys,
        values=lambda: config.codec.decode(layer.v),
        apply_rope=rotate,
    )


def _slots_of_new(layer: dense.DenseLayer, count: int) -> Int[Array, "B K T"]:
    """The slots that the next `count` pairs of an ordered layer will take."""
    return dense.live(layer)[..., None] + jnp.arange(count, dtype=jnp.int32)[None, None]


def _observed(needs, q, raw, v, tokens, ops: LayerOps) -> dict[str, Array]:
    """The parts of an observation that attention does not know."""

    def output_norm():
        added = jnp.abs(ops.value_contribution(v).astype(jnp.float32))
        return jnp.mean(jnp.sum(added, axis=-1), axis=2)

    known = {
        "queries": lambda: q,
        "pre_rope_queries": lambda: raw,
        "output_norm": output_norm,
        "tokens": lambda: tokens,
    }
    return {name: known[name]() for name in needs & known.keys()}


def _set(items: tuple, index: int, item) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
