"""Eviction: before new tokens are appended, and between prefill and decode.

The budget and the schedule decide how many pairs a head evicts, the policy's scores
decide which.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import head_groups
from kvjax.cache.layouts import Layout
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import NAN_SCORE, KVState
from kvjax.parallel import axes, host
from kvjax.policies import base
from kvjax.types import PyTree, Scoring, Stats, View


class PolicyInputs(NamedTuple):
    """Inputs of one layer's policy besides the cache; see `kvjax.types.View`."""

    apply_rope: Callable[..., Array]
    scoring: Scoring = Scoring()
    params: PyTree = None
    layer_number: int | Int[Array, ""] = 0


class _Demand(NamedTuple):
    """The evictions that a head group needs before new pairs fit.

    Attributes:
      place: of the head group in the state.
      heads: of the head group.
      drop: i32[B, K], pairs that each head has to evict.
      busy: bool[B], rows in which some head has to evict.
      view: (layer, query_position, num_keep) -> the policy's view.
    """

    place: int
    heads: head_groups.Heads
    drop: Array
    busy: Array
    view: Callable[..., View]


def evict_overflow(
    state: KVState,
    inputs: Mapping[int, PolicyInputs],
    tokens: int,
    *,
    config: CacheSpec,
    n: Int[Array, "B"],
    is_prefill: bool,
    head_numbers: Int[Array, "K"] | None = None,
) -> KVState:
    """Evicts pairs in these layers where new tokens would exceed the budget.

    A head whose live pairs and the new ones would exceed the budget evicts its least
    important pairs. It also evicts pairs that the policy would keep at no budget; under
    a policy that compares heads, so do all other heads of its row.

    Evictions depend on nothing that the step computes, so one condition covers all
    layers: a step without evictions costs next to nothing, and on a GPU no layer waits
    for the host to read a condition.

    Args:
      state: before the tokens are appended.
      inputs: of the policy, by the layer's index in the state.
      tokens: T, new tokens per row; 1 when decoding.
      config: budgets, schedule, policy and layout.
      n: real tokens per row.
      is_prefill: whether the tokens belong to the prompt.
      head_numbers: the heads' numbers in the model's layer, if the state has not all.
    """
    layout = config.layout
    if not config.schedule.evicts(is_prefill):
        return state
    demands = [
        _demand(state, index, place, heads, own_inputs, config, n, head_numbers)
        for index, own_inputs in inputs.items()
        for place, heads in groups_of(state, index)
    ]
    few = config.rows_per_eviction or max(4, -(-len(n) // 8))
    rows = few if tokens == 1 else len(n)
    masks = jax.lax.cond(
        functools.reduce(jnp.logical_or, [jnp.any(each.busy) for each in demands]),
        lambda: [_select(state, each, config, rows) for each in demands],
        lambda: [_select_none(state, each, layout) for each in demands],
    )
    for demand, (evicted, is_nan) in zip(demands, masks, strict=True):
        place = demand.place
        layer, stats = layout.evict(state.layers[place], evicted), state.stats[place]
        if config.eviction != "in_place":
            layer, stats = compacted_if(demand.busy, layer, stats, layout)
        state = with_error(state, NAN_SCORE, is_nan, demand.heads).replace(
            layers=with_item(state.layers, place, layer),
            stats=with_item(state.stats, place, stats),
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
    """Evicts between prefill and decode, and moves the live pairs to a new capacity.

    Under `after_prefill`, heads keep at most their budget. Under `decode_only`, a head
    at or above its budget keeps as many pairs as before the first decoded token, its
    budget less `evict_size`. Pairs that the policy would keep at no budget are evicted
    too. Under the other schedules nothing is evicted here. Codecs that wait for the end
    of the prompt encode the live pairs.

    Args:
      state: after the prompt.
      config: budgets, schedule, policy and layout.
      capacity: slots per head afterwards, one number per head group of every layer.
      apply_ropes: `LayerOps.apply_rope` of every layer.
      policy_params: every layer's weights of a learned policy.
      first_layer: the number in the model of the state's first layer.
      head_numbers: the heads' numbers in the model's layer, if the state has not all.
      scorings: `LayerOps.scoring` of every layer; None for plain ones.
    """
    layout, layers, stats = config.layout, [], []
    evicts = config.policy and not config.schedule.evicts_in_prefill
    for index in range(len(state.heads)):
        inputs = PolicyInputs(
            apply_ropes[index],
            scorings[index] if scorings else Scoring(),
            policy_params and policy_params[index],
            first_layer + index,
        )
        for place, heads in groups_of(state, index):
            layer, stat = state.layers[place], state.stats[place]
            if evicts:
                budget = head_groups.size_of(config.budget[index], heads)
                view = view_maker(state, config, inputs, heads, budget, head_numbers)
                num_keep = _kept_after_prompt(layout.live(layer), budget, config)
                drop = layout.live(layer) - num_keep
                seen = view(layer, state.next_pos - 1, num_keep)
                evicted, is_nan = _select_by_score(stat, seen, drop, drop > 0, config)
                layer = layout.evict(layer, evicted)
                state = with_error(state, NAN_SCORE, is_nan, heads)
            layer, per_slot = layout.compact(layer, stat.per_slot, capacity[place])
            if config.codec.after_prompt:
                layer = layout.encode(layer, config.codec_of(index))
            layers.append(layer)
            stats.append(stat._replace(per_slot=per_slot))
    return state.replace(layers=tuple(layers), stats=tuple(stats))


def _kept_after_prompt(
    live: Int[Array, "B K"], budget: int, config: CacheSpec
) -> Int[Array, "B K"]:
    """Returns the pairs that every head keeps when the prompt is read."""
    if not config.schedule.evicts_in_decode:
        return jnp.minimum(live, budget)
    return jnp.where(live >= budget, budget - config.schedule.evict_size, live)


def groups_of(state: KVState, index: int) -> list[tuple[int, head_groups.Heads]]:
    """Returns the place and the heads of a layer's head groups.

    On a mesh, heads are those that this device holds.
    """
    count = state.error.shape[1]
    return [
        (place, head_groups.local_heads(heads, count))
        for place, heads in state.head_groups(index)
    ]


def _demand(
    state: KVState,
    index: int,
    place: int,
    heads: head_groups.Heads,
    inputs: PolicyInputs,
    config: CacheSpec,
    n: Int[Array, "B"],
    head_numbers: Int[Array, "K"] | None,
) -> _Demand:
    """Counts the pairs that the heads of a head group evict before n new ones."""
    budget = head_groups.size_of(config.budget[index], heads)
    live = config.layout.live(state.layers[place])
    overflows = (live + n[:, None] > budget) & (n > 0)[:, None]
    drop = jnp.where(overflows, live - (budget - config.schedule.evict_size), 0)
    busy = jnp.any(drop > 0, axis=1)
    if config.policy.needs_all_heads:
        # The policy gathers scores of all heads, so all devices of a row take part.
        busy = axes.any_head(busy)
    view = view_maker(state, config, inputs, heads, budget, head_numbers)
    return _Demand(place, heads, drop, busy, view)


def compacted_if(
    rows: Bool[Array, "B"], layer: PyTree, stats: Stats, layout: Layout
) -> tuple[PyTree, Stats]:
    """Moves the live pairs of all rows together if any of these rows has evicted."""
    capacity = layout.capacity(layer)

    def moved():
        tidy, per_slot = layout.compact(layer, stats.per_slot, capacity)
        return tidy, stats._replace(per_slot=per_slot)

    return jax.lax.cond(jnp.any(rows), moved, lambda: (layer, stats))


def _select(
    state: KVState, demand: _Demand, config: CacheSpec, rows: int
) -> tuple[Bool[Array, "B K C"], Bool[Array, "B K"]]:
    """Returns the slots to evict, and the heads whose scores held NaN.

    Works through the busy rows, `rows` of them at a time.
    """
    layout, last = config.layout, state.next_pos - 1
    layer, stats = state.layers[demand.place], state.stats[demand.place]

    def of_rows(layer, stats, drop, busy, query_position):
        view = demand.view(layer, query_position, layout.live(layer) - drop)
        whole = config.policy.needs_all_heads
        selects = jnp.broadcast_to(busy[:, None], drop.shape) if whole else drop > 0
        evicted, is_nan = _select_by_score(stats, view, drop, selects, config)
        return evicted & selects[..., None], is_nan

    drop, busy = demand.drop, demand.busy
    if rows >= len(drop):
        # A condition per head group, so that their temporary memory is shared.
        return jax.lax.cond(
            jnp.any(busy),
            lambda: of_rows(layer, stats, drop, busy, last),
            lambda: _select_none(state, demand, layout),
        )

    def some_rows(carry):
        found, drop, busy = carry
        # The last rows chosen may not be busy: they drop nothing.
        chosen = jnp.argsort(~busy, stable=True)[:rows]
        some = layout.rows(layer, chosen)
        some_stats = jax.tree.map(lambda leaf: host.rows(leaf, chosen), stats)
        new = of_rows(some, some_stats, drop[chosen], busy[chosen], last[chosen])
        add = lambda old, more: old.at[chosen].set(old[chosen] | more)
        done = drop.at[chosen].set(0), busy.at[chosen].set(False)
        return jax.tree.map(add, found, new), *done

    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[2]),
        some_rows,
        (_select_none(state, demand, layout), drop, busy),
    )[0]


def _select_none(state: KVState, demand: _Demand, layout: Layout) -> tuple:
    """Returns `_select`'s arrays with nothing to evict."""
    capacity, shape = layout.capacity(state.layers[demand.place]), demand.drop.shape
    return jnp.zeros((*shape, capacity), bool), jnp.zeros(shape, bool)


def _select_by_score(
    stats: Stats,
    view: View,
    drop: Int[Array, "B K"],
    selects: Bool[Array, "B K"],
    config: CacheSpec,
) -> tuple[Bool[Array, "B K C"], Bool[Array, "B K"]]:
    """Returns the slots of the lowest scores, and the selecting heads that have NaN."""
    score = config.policy.score(stats, view)
    is_nan = jnp.any(jnp.isnan(score) & (view.positions >= 0), axis=-1) & selects
    return base.select_evictions(score, view.positions, drop), is_nan


def with_error(
    state: KVState, bit: int, where: Bool[Array, "B K"], heads: head_groups.Heads
) -> KVState:
    """Sets an error bit where True; `where` has the heads of a head group, or all."""
    bits = jnp.where(where, jnp.uint32(bit), jnp.uint32(0))
    if heads is None:
        return state.replace(error=state.error | bits)
    at = state.error.at[:, np.asarray(heads)]
    return state.replace(error=at.set(head_groups.take(state.error, heads) | bits))


def view_maker(
    state: KVState,
    config: CacheSpec,
    inputs: PolicyInputs,
    heads: head_groups.Heads,
    budget: int | None,
    head_numbers: Int[Array, "K"] | None,
) -> Callable[[PyTree, Int[Array, "B"], Int[Array, "B K"]], View]:
    """Returns (layer, query_position, num_keep) -> the view of a head group."""
    layout = config.layout
    if head_numbers is None:
        head_numbers = axes.head_numbers(state.error.shape[1], heads)

    def view(layer, query_position, num_keep) -> View:
        return View(
            positions=layout.positions(layer),
            query_position=query_position,
            num_keep=num_keep,
            keys=lambda: rotated_keys(layout.keys(layer), inputs.apply_rope, config),
            values=lambda: layout.values(layer),
            apply_rope=inputs.apply_rope,
            layer=inputs.layer_number,
            params=inputs.params,
            gather_heads=axes.all_heads,
            heads=head_numbers,
            budget=budget,
            mean_budget=config.mean_budget,
            scoring=inputs.scoring,
        )

    return view


def rotated_keys(
    keys: Float[Array, "B K C D"], apply_rope: Callable[..., Array], config: CacheSpec
) -> Float[Array, "B K C D"]:
    """Returns keys as attention reads them.

    Under `rope_positions="cache"` keys are stored without rotary positions, and get
    those of their slots here.
    """
    if config.rope_positions == "original":
        return keys
    batch, _, capacity = keys.shape[:3]
    slots = jnp.arange(capacity, dtype=jnp.int32)[None]
    return apply_rope(keys, jnp.broadcast_to(slots, (batch, capacity)))


def with_item(items: tuple, index: int, item) -> tuple:
    """Returns the tuple with another item at `index`."""
    return (*items[:index], item, *items[index + 1 :])
