"""Which pairs go: before new tokens, and between the prompt and decoding.

A policy's scores choose them; how many is for the budget and the schedule to say.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import parts
from kvjax.cache.layouts import Layout
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import NAN_SCORE, KVState
from kvjax.parallel import axes, host
from kvjax.policies import base
from kvjax.types import PyTree, Scoring, Stats, View


class Lent(NamedTuple):
    """What a layer's policy is lent to choose by; see `kvjax.types.View`."""

    apply_rope: Callable[..., Array]
    scoring: Scoring = Scoring()
    policy_params: PyTree = None
    number: int | Int[Array, ""] = 0


class _Crowded(NamedTuple):
    """A part of a layer in which some heads may have to drop pairs.

    Attributes:
      place: of the part in the state.
      heads: of the part.
      drop: i32[B, K], how many each head does.
      busy: bool[B], rows in which one does.
      view: (layer, now, keep) -> what the policy sees.
    """

    place: int
    heads: parts.Heads
    drop: Array
    busy: Array
    view: Callable[..., View]


def make_room(
    state: KVState,
    layers: Mapping[int, Lent],
    tokens: int,
    *,
    config: CacheSpec,
    n: Int[Array, "B"],
    is_prefill: bool,
    head_numbers: Int[Array, "K"] | None = None,
) -> KVState:
    """Evicts in all these layers what has to go before new tokens are appended.

    A head whose live pairs and the new ones would exceed the budget drops its least
    important ones. Heads that drop any also lose what the policy would not keep at any
    budget; under one that looks across heads, all heads of their row do.

    What goes depends on nothing that the step computes, so that one question settles it
    for all layers: a step in which none is full costs next to nothing, and on a GPU no
    layer waits for the host to hear whether it is.

    Args:
      state: what the rows have kept so far.
      layers: by their place in the state.
      tokens: T, new ones per row; one of decoding.
      config: what is kept, and when.
      n: real tokens per row.
      is_prefill: whether the tokens are the prompt's.
      head_numbers: the heads' indices in the model's layer, where they are not all.
    """
    schedule, layout = config.schedule, config.layout
    if not schedule.evicts(is_prefill):
        return state
    crowded = [
        _crowded(state, index, place, heads, lent, config, n, head_numbers)
        for index, lent in layers.items()
        for place, heads in parts_of(state, index)
    ]
    few = config.rows_per_eviction or max(4, -(-len(n) // 8))
    rows = few if tokens == 1 else len(n)
    gone = jax.lax.cond(
        functools.reduce(jnp.logical_or, [jnp.any(each.busy) for each in crowded]),
        lambda: [_victims(state, each, config, rows) for each in crowded],
        lambda: [_no_victims(state, each, layout) for each in crowded],
    )
    for each, (victims, nan) in zip(crowded, gone, strict=True):
        state = noted(state, NAN_SCORE, nan, each.heads)
        layer = layout.evict(state.layers[each.place], victims)
        stats = state.stats[each.place]
        if config.eviction != "in_place":
            layer, stats = tidied(layer, stats, each.busy, layout)
        state = state.replace(
            layers=with_item(state.layers, each.place, layer),
            stats=with_item(state.stats, each.place, stats),
        )
    return state


def compact(
    state: KVState,
    config: CacheSpec,
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
            view = view_of(
                layer,
                state.next_pos - 1,
                target,
                apply_rope=apply_ropes[index],
                scoring=scorings[index] if scorings else Scoring(),
                config=config,
                number=first_layer + index,
                params=policy_params and policy_params[index],
                heads=numbers_of_heads(count, heads, head_numbers),
                budget=budget,
            )
            drop = held - target
            gone, nan = _chosen(stat, view, drop, drop > 0, config)
            layer = layout.evict(layer, gone)
            state = noted(state, NAN_SCORE, nan, heads)
        layer, per_slot = layout.compact(layer, stat.per_slot, capacity[place])
        if config.codec.after_prompt:
            layer = layout.encode(layer, config.codec_of(index))
        layers.append(layer)
        stats.append(stat._replace(per_slot=per_slot))
    return state.replace(layers=tuple(layers), stats=tuple(stats))


def _all_parts(state: KVState) -> Iterator[tuple[int, int, parts.Heads]]:
    """Layer, place and heads of every part; over a mesh, those heads that are here."""
    for index in range(len(state.heads)):
        for place, heads in parts_of(state, index):
            yield index, place, heads


def parts_of(state: KVState, index: int) -> list[tuple[int, parts.Heads]]:
    """Place and heads of a layer's parts; over a mesh, those heads that are here."""
    count = state.error.shape[1]
    return [(place, parts.here(heads, count)) for place, heads in state.parts(index)]


def _crowded(
    state: KVState,
    index: int,
    place: int,
    heads: parts.Heads,
    lent: Lent,
    config: CacheSpec,
    n: Int[Array, "B"],
    head_numbers: Int[Array, "K"] | None,
) -> _Crowded:
    """How many pairs the heads of a part drop before n new ones."""
    budget = parts.size_of(config.budget[index], heads)
    held = config.layout.live(state.layers[place])
    full = (held + n[:, None] > budget) & (n > 0)[:, None]
    drop = jnp.where(full, held - (budget - config.schedule.evict_size), 0)
    busy = jnp.any(drop > 0, axis=1)
    if config.policy.needs_all_heads:  # whoever asks for the others' must be answered
        busy = axes.any_head(busy)
    view = functools.partial(
        view_of,
        apply_rope=lent.apply_rope,
        scoring=lent.scoring,
        config=config,
        number=lent.number,
        params=lent.policy_params,
        heads=numbers_of_heads(state.error.shape[1], heads, head_numbers),
        budget=budget,
    )
    return _Crowded(place, heads, drop, busy, view)


def tidied(
    layer: PyTree, stats: Stats, busy: Bool[Array, "B"], layout: Layout
) -> tuple[PyTree, Stats]:
    """The live pairs moved together, where any row has lost some."""
    capacity = layout.capacity(layer)

    def moved():
        tidy, per_slot = layout.compact(layer, stats.per_slot, capacity)
        return tidy, stats._replace(per_slot=per_slot)

    return jax.lax.cond(jnp.any(busy), moved, lambda: (layer, stats))


def _victims(
    state: KVState, crowded: _Crowded, config: CacheSpec, rows: int
) -> tuple[Bool[Array, "B K C"], Bool[Array, "B K"]]:
    """The slots whose pairs go, and the heads that chose by scores with NaN.

    Works through the rows that drop anything, `rows` of them at a time.
    """
    place, _, drop, busy, view = crowded
    layout, last = config.layout, state.next_pos - 1
    layer, stats = state.layers[place], state.stats[place]

    def choose(layer, stats, drop, busy, now):
        seen = view(layer, now, layout.live(layer) - drop)
        whole = config.policy.needs_all_heads
        chooses = jnp.broadcast_to(busy[:, None], drop.shape) if whole else drop > 0
        gone, nan = _chosen(stats, seen, drop, chooses, config)
        return gone & chooses[..., None], nan

    if rows >= len(drop):  # a condition of its own: its memory is the next part's too
        return jax.lax.cond(
            jnp.any(busy),
            lambda: choose(layer, stats, drop, busy, last),
            lambda: _no_victims(state, crowded, layout),
        )

    def some_rows(carry):
        found, drop, busy = carry
        chosen = jnp.argsort(~busy, stable=True)[:rows]  # some may be done already
        held = layout.rows(layer, chosen)
        own_stats = jax.tree.map(lambda leaf: host.rows(leaf, chosen), stats)
        new = choose(held, own_stats, drop[chosen], busy[chosen], last[chosen])
        add = lambda old, more: old.at[chosen].set(old[chosen] | more)
        done = drop.at[chosen].set(0), busy.at[chosen].set(False)
        return jax.tree.map(add, found, new), *done

    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[2]),
        some_rows,
        (_no_victims(state, crowded, layout), drop, busy),
    )[0]


def _no_victims(state: KVState, crowded: _Crowded, layout: Layout) -> tuple:
    """`_victims` where nothing goes."""
    capacity, shape = layout.capacity(state.layers[crowded.place]), crowded.drop.shape
    return jnp.zeros((*shape, capacity), bool), jnp.zeros(shape, bool)


def _chosen(
    stats: Stats,
    view: View,
    drop: Int[Array, "B K"],
    chooses: Bool[Array, "B K"],
    config: CacheSpec,
) -> tuple[Bool[Array, "B K C"], Bool[Array, "B K"]]:
    """`select_evictions` by the policy's scores, and which that choose had NaN."""
    score = config.policy.score(stats, view)
    nan = jnp.any(jnp.isnan(score) & (view.positions >= 0), axis=-1) & chooses
    return base.select_evictions(score, view.positions, drop), nan


def noted(
    state: KVState, bit: int, where: Bool[Array, "B K"], heads: parts.Heads
) -> KVState:
    """The state with the error bit set for these heads, of a part or of all."""
    found = jnp.where(where, jnp.uint32(bit), jnp.uint32(0))
    if heads is None:
        return state.replace(error=state.error | found)
    at = state.error.at[:, np.asarray(heads)]
    return state.replace(error=at.set(parts.taken(state.error, heads) | found))


def view_of(
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
        keys=lambda: turned(layout.keys(layer), apply_rope, config),
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


def numbers_of_heads(
    count: int, heads: parts.Heads, known: Int[Array, "K"] | None
) -> Int[Array, "K"] | None:
    """A part's heads by their numbers in the layer, of which `count` are here."""
    return axes.head_numbers(count, heads) if known is None else known


def turned(
    keys: Float[Array, "B K C D"], apply_rope: Callable[..., Array], config: CacheSpec
) -> Float[Array, "B K C D"]:
    """Keys as attention sees them: turned by their slots if they lie there unturned."""
    if config.rope_positions == "original":
        return keys
    batch, _, capacity = keys.shape[:3]
    slots = jnp.arange(capacity, dtype=jnp.int32)[None]
    return apply_rope(keys, jnp.broadcast_to(slots, (batch, capacity)))


def with_item(items: tuple, index: int, item) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
