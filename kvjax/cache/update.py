"""The one transition of a KV state: make room, append, attend, observe.

Shapes never change, so the state is carried through `lax` loops and donated. How much
each layer holds, when it evicts and by which policy is a `CacheConfig`, static; where
and how pairs lie is the business of its layout and codec.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import attention
from kvjax.cache import offload, parts
from kvjax.cache.config import CacheConfig
from kvjax.cache.layouts import Layout
from kvjax.cache.state import NAN_SCORE, OVERFLOW, KVState, next_positions
from kvjax.parallel import axes, host
from kvjax.policies import base
from kvjax.types import LayerOps, PyTree, Scoring, Stats, View


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
    is_prefill: bool,
    policy_params: PyTree = None,
    layer_number: int | Int[Array, ""] | None = None,
    head_numbers: Int[Array, "K"] | None = None,
) -> tuple[Float[Array, "B K G T D"], KVState]:
    """One layer's transition for T new tokens, of which each row's first `n` are real.

    Algorithm 1 (Batch-Max): where a head's live pairs and the new ones would exceed the
    budget, it drops all but |kv| - `evict_size` pairs; then the new pairs are appended;
    then the queries see the kept pairs and, causally, their own block; then the policy
    observes. Layers of the full cache that have a window drop what has left it.

    Args:
      index: the layer's place in the state.
      q: queries, before rotary positions.
      k: keys, before rotary positions.
      v: values.
      ops: the layer's functions.
      state: what the row has kept so far.
      config: what is kept, and when.
      n: real tokens per row.
      tokens: their ids; only for policies that need them.
      is_prefill: whether the tokens are the prompt's: schedules treat them differently.
      policy_params: this layer's weights of a learned rule.
      layer_number: the layer's index in the model; None is `index`.
      head_numbers: the heads' indices in the model's layer, where they are not all.
    """
    places = [
        (place, parts.here(heads, q.shape[1])) for place, heads in state.parts(index)
    ]
    number = index if layer_number is None else layer_number
    found = []
    for place, heads in places:
        size = config.budget and parts.size_of(config.budget[index], heads)
        view = functools.partial(
            _view,
            apply_rope=ops.apply_rope,
            scoring=ops.scoring,
            config=config,
            number=number,
            params=policy_params,
            heads=_numbers(q.shape[1], heads, head_numbers),
            budget=size,
        )
        out, state = _step_part(
            *(place, heads, size, view),
            *(parts.taken(x, heads) for x in (q, k, v)),
            *(parts.ops_of(ops, heads), state),
            config=config,
            window=config.window(index),
            recalls=config.recalls(index),
            n=n,
            tokens=tokens,
            is_prefill=is_prefill,
        )
        found.append(out)
    return parts.joined(found, [heads for _, heads in places]), state


def _step_part(
    place: int,
    heads: parts.Heads,
    budget: int | None,
    view: Callable[..., View],
    q: Array,
    k: Array,
    v: Array,
    ops: LayerOps,
    state: KVState,
    *,
    config: CacheConfig,
    window: int,
    recalls: bool,
    n: Array,
    tokens: Array | None,
    is_prefill: bool,
) -> tuple[Array, KVState]:
    """`step_layer` for heads that keep the same number of pairs."""
    layer, stats = state.layers[place], state.stats[place]
    last, layout, schedule = state.next_pos - 1, config.layout, config.schedule
    evicts = schedule.evicts_in_prefill if is_prefill else schedule.evicts_in_decode
    if evicts:
        held = layout.live(layer)
        full = (held + n[:, None] > budget) & (n > 0)[:, None]
        drop = jnp.where(full, held - (budget - schedule.evict_size), 0)
        rows = config.rows_per_eviction if q.shape[3] == 1 else q.shape[0]
        layer, stats, nan = make_room(layer, stats, drop, last, view, config, rows)
        state = _noted(state, NAN_SCORE, nan, heads)
    positions = next_positions(state, q.shape[3])
    before_rope = q
    if config.rope_positions == "original":
        q, k = ops.apply_rope(q), ops.apply_rope(k)
    else:
        q = ops.apply_rope(q, _slots_of_new(layout.live(layer), q.shape[3]))
    layer, per_slot, slots, overflow = layout.claim(layer, stats.per_slot, positions, n)
    stats = stats._replace(per_slot=per_slot)
    wanted = config.required_stats(is_prefill)
    attended = _attended if is_prefill or not recalls else _recalled
    layer, partial, seen = attended(
        layer, q, k, v, slots, positions, n, wanted, ops, config
    )
    if config.policy and (is_prefill or schedule.evicts_in_decode):
        extra = _observed(wanted, q, before_rope, v, tokens, ops)
        now = view(layer, last + n, layout.live(layer))
        seen = seen._replace(is_prefill=is_prefill, **extra)
        stats = config.policy.observe(stats, now, seen)
    if window:
        layer = _only_in(window, layer, last + n, layout)
    state = _noted(state, OVERFLOW, overflow, heads).replace(
        layers=_set(state.layers, place, layer),
        stats=_set(state.stats, place, stats),
    )
    return attention.normalize(partial).astype(q.dtype), state


def _attended(
    layer, q, k, v, slots, positions, n, wanted, ops: LayerOps, config: CacheConfig
):
    """Writes the new pairs to their slots and attends, in one kernel where it can be.

    Returns the layer, the partial attention and the observation.
    """
    layout, how = config.layout, (wanted, config.implementation, ops.scoring)
    if layout.write_attend and config.rope_positions == "original":
        given = q, k, v, slots, positions, n
        if both := layout.write_attend(layer, *given, *how):
            return both
    layer = layout.write(layer, k, v, slots, positions)
    turned = None
    if config.rope_positions != "original":
        turned = functools.partial(_turned, apply_rope=ops.apply_rope, config=config)
    return layer, *layout.attend(layer, q, positions, n, *how, turned)


def _recalled(
    layer, q, k, v, slots, positions, n, wanted, ops: LayerOps, config: CacheConfig
):
    """`_attended` with the values of few pairs, which come from host memory."""
    layout = config.layout
    layer = layout.write_keys(layer, k, slots, positions)
    keys = _turned(layout.keys(layer), ops.apply_rope, config)
    given = q, keys, layout.positions(layer), positions, n, wanted, ops.scoring
    choice = offload.choose(*given, config.offload)
    wanted = choice.slots.reshape(*choice.slots.shape[:2], -1)
    layer, values = layout.exchange_values(layer, v, slots, positions, wanted)
    return layer, offload.attended(choice, values, config.offload), choice.seen


def _only_in(
    window: int, layer: PyTree, now: Int[Array, "B"], layout: Layout
) -> PyTree:
    """The layer with what the newest token sees: later ones see nothing before it."""
    return layout.evict(layer, layout.positions(layer) <= now[:, None, None] - window)


def make_room(
    layer: PyTree,
    stats: Stats,
    drop: Int[Array, "B K"],
    now: Int[Array, "B"],
    view: Callable[..., View],
    config: CacheConfig,
    rows: int,
) -> tuple[PyTree, Stats, Bool[Array, "B K"]]:
    """Drops the `drop` least important pairs of every head of every row.

    Heads that drop any also lose what the policy would not keep at any budget; under
    one that looks across heads, all heads of their row do. Works through the rows that
    drop anything, `rows` of them at a time, and costs next to nothing when there are
    none. Also returns which heads chose by scores with NaN.
    """
    busy = jnp.any(drop > 0, axis=1)
    if config.policy.needs_all_heads:  # whoever asks for the others' must be answered
        busy = axes.any_head(busy)
    gone, nan = _victims(layer, stats, drop, busy, now, view, config, rows)
    layer = config.layout.evict(layer, gone)
    if config.eviction == "in_place":
        return layer, stats, nan
    capacity = gone.shape[2]

    def moved():
        tidy, per_slot = config.layout.compact(layer, stats.per_slot, capacity)
        return tidy, stats._replace(per_slot=per_slot)

    layer, stats = jax.lax.cond(jnp.any(busy), moved, lambda: (layer, stats))
    return layer, stats, nan


def compact(
    state: KVState,
    config: CacheConfig,
    capacity: tuple[int, ...],
    apply_ropes: Sequence[Callable[..., Array]],
    policy_params: Sequence[PyTree] | None = None,
    first_layer: int | Int[Array, ""] = 0,
    head_numbers: Int[Array, "K"] | None = None,
    scorings: Sequence[Scoring] | None = None,
) -> KVState:
    """Shrinks (or grows) the state between prefill and decode.

    Heads that hold more than the schedule lets into decoding drop their least important
    pairs first: to the budget (`after_prefill`), or to the room that the first decoded
    token would make (`decode_only`). What the policy would not keep at any budget goes
    too. Under `prefill_only` nothing goes: heads are within the budget. Codecs that
    wait for the end of the prompt encode what is left.

    Args:
      state: after the prompt.
      config: what is kept, and when.
      capacity: slots per head of every part of every layer afterwards.
      apply_ropes: `LayerOps.apply_rope` of every layer.
      policy_params: every layer's weights of a learned rule.
      first_layer: the number in the model of the state's first layer.
      head_numbers: the heads' indices in the model's layer, where they are not all.
      scorings: `LayerOps.scoring` of every layer; None where all are plain.
    """
    layout, layers, stats = config.layout, [], []
    count = state.error.shape[1]
    for index, place, heads in _all_parts(state):
        layer, stat = state.layers[place], state.stats[place]
        if config.policy and not config.schedule.evicts_in_prefill:
            budget = parts.size_of(config.budget[index], heads)
            held = layout.live(layer)
            if config.schedule.evicts_in_decode:
                fewer = budget - config.schedule.evict_size
                target = jnp.where(held >= budget, fewer, held)
            else:
                target = jnp.minimum(held, budget)
            view = _view(
                layer,
                state.next_pos - 1,
                target,
                apply_rope=apply_ropes[index],
                scoring=scorings[index] if scorings else Scoring(),
                config=config,
                number=first_layer + index,
                params=policy_params and policy_params[index],
                heads=_numbers(count, heads, head_numbers),
                budget=budget,
            )
            drop = held - target
            gone, nan = _chosen(stat, view, drop, drop > 0, config)
            layer = layout.evict(layer, gone)
            state = _noted(state, NAN_SCORE, nan, heads)
        layer, per_slot = layout.compact(layer, stat.per_slot, capacity[place])
        if config.codec.after_prompt:
            layer = layout.encode(layer, config.codec_of(index))
        layers.append(layer)
        stats.append(stat._replace(per_slot=per_slot))
    return state.replace(layers=tuple(layers), stats=tuple(stats))


def _all_parts(state: KVState) -> Iterator[tuple[int, int, parts.Heads]]:
    """Layer, place and heads of every part; over a mesh, those heads that are here."""
    for index in range(len(state.heads)):
        for place, heads in state.parts(index):
            yield index, place, parts.here(heads, state.error.shape[1])


def measure(
    index: int,
    before: Float[Array, "B T M"],
    after: Float[Array, "B T M"],
    state: KVState,
    *,
    config: CacheConfig,
    n: Int[Array, "B"],
) -> KVState:
    """Adds up what the budget rule sees in one layer's attention of n real tokens."""
    found = config.budget_rule.measure(before, after).astype(jnp.float32)
    real = jnp.arange(found.shape[1], dtype=jnp.int32)[None] < n[:, None]
    total = jnp.sum(found, axis=1, where=real)
    return state.replace(measured=state.measured.at[:, index].add(total))


def _victims(
    layer: PyTree,
    stats: Stats,
    drop: Int[Array, "B K"],
    busy: Bool[Array, "B"],
    now: Int[Array, "B"],
    view: Callable[..., View],
    config: CacheConfig,
    rows: int,
) -> tuple[Bool[Array, "B K C"], Bool[Array, "B K"]]:
    """The slots whose pairs go, and the heads that chose by scores with NaN."""
    layout, batch = config.layout, drop.shape[0]

    def choose(layer, stats, drop, busy, now):
        seen = view(layer, now, layout.live(layer) - drop)
        whole = config.policy.needs_all_heads
        chooses = jnp.broadcast_to(busy[:, None], drop.shape) if whole else drop > 0
        gone, nan = _chosen(stats, seen, drop, chooses, config)
        return gone & chooses[..., None], nan

    none = (
        jnp.zeros((*drop.shape, layout.capacity(layer)), bool),
        jnp.zeros(drop.shape, bool),
    )
    if rows >= batch:
        return jax.lax.cond(
            jnp.any(busy), lambda: choose(layer, stats, drop, busy, now), lambda: none
        )

    def some_rows(carry):
        found, drop, busy = carry
        chosen = jnp.argsort(~busy, stable=True)[:rows]  # some may be done already
        held, seen = jax.tree.map(lambda leaf: host.rows(leaf, chosen), (layer, stats))
        new = choose(held, seen, drop[chosen], busy[chosen], now[chosen])
        add = lambda old, more: old.at[chosen].set(old[chosen] | more)
        done = drop.at[chosen].set(0), busy.at[chosen].set(False)
        return jax.tree.map(add, found, new), *done

    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[2]), some_rows, (none, drop, busy)
    )[0]


def _chosen(
    stats: Stats,
    view: View,
    drop: Int[Array, "B K"],
    chooses: Bool[Array, "B K"],
    config: CacheConfig,
) -> tuple[Bool[Array, "B K C"], Bool[Array, "B K"]]:
    """`select_evictions` by the policy's scores, and which that choose had NaN."""
    score = config.policy.score(stats, view)
    nan = jnp.any(jnp.isnan(score) & (view.positions >= 0), axis=-1) & chooses
    return base.select_evictions(score, view.positions, drop), nan


def _noted(
    state: KVState, bit: int, where: Bool[Array, "B K"], heads: parts.Heads
) -> KVState:
    """The state with the error bit set for these heads, of a part or of all."""
    found = jnp.where(where, jnp.uint32(bit), jnp.uint32(0))
    if heads is None:
        return state.replace(error=state.error | found)
    at = state.error.at[:, np.asarray(heads)]
    return state.replace(error=at.set(parts.taken(state.error, heads) | found))


def _view(
    layer: PyTree,
    now: Array,
    keep: Array,
    *,
    apply_rope,
    scoring: Scoring,
    config,
    number,
    params,
    heads: Int[Array, "K"] | None,
    budget: int | None,
) -> View:
    """What a policy sees of these heads."""
    layout = config.layout
    return View(
        positions=layout.positions(layer),
        query_position=now,
        num_keep=keep,
        keys=lambda: _turned(layout.keys(layer), apply_rope, config),
        values=lambda: layout.values(layer),
        apply_rope=apply_rope,
        layer=number,
        params=params,
        gather_heads=axes.all_heads,
        heads=heads,
        budget=budget,
        mean_budget=config.mean_budget,
        scoring=scoring,
    )


def _numbers(
    count: int, heads: parts.Heads, known: Int[Array, "K"] | None
) -> Int[Array, "K"] | None:
    """A part's heads by their numbers in the layer, of which `count` are here."""
    return axes.head_numbers(count, heads) if known is None else known


def _turned(
    keys: Float[Array, "B K C D"], apply_rope: Callable[..., Array], config: CacheConfig
) -> Float[Array, "B K C D"]:
    """Keys as attention sees them: turned by their slots if they lie there unturned."""
    if config.rope_positions == "original":
        return keys
    batch, _, capacity = keys.shape[:3]
    slots = jnp.arange(capacity, dtype=jnp.int32)[None]
    return apply_rope(keys, jnp.broadcast_to(slots, (batch, capacity)))


def _slots_of_new(held: Int[Array, "B K"], count: int) -> Int[Array, "B K T"]:
    """The slots that the next `count` pairs of an ordered layer will take."""
    return held[..., None] + jnp.arange(count, dtype=jnp.int32)[None, None]


def _observed(wanted, q, before_rope, v, tokens, ops: LayerOps) -> dict[str, Array]:
    """The parts of an observation that attention does not know."""

    def output_norm():
        added = jnp.abs(ops.value_contribution(v).astype(jnp.float32))
        return jnp.mean(jnp.sum(added, axis=-1), axis=2)

    known = {
        "queries": lambda: q,
        "pre_rope_queries": lambda: before_rope,
        "output_norm": output_norm,
        "tokens": lambda: tokens,
        "hidden": lambda: ops.hidden,
    }
    return {name: known[name]() for name in wanted & known.keys()}


def _set(items: tuple, index: int, item) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
