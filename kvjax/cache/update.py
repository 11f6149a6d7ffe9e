"""The one transition of a KV state: evict, append, attend, observe.

Shapes never change, so the state is carried through `lax` loops and donated. A static
`CacheSpec` says how much each layer keeps, when it evicts and by which policy; the
layout and the codec decide where pairs lie and how they are stored.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import attention
from kvjax.attention import AttentionSpec, Pairs, Queries
from kvjax.cache import eviction, head_groups, offload
from kvjax.cache import prefix as prefixes
from kvjax.cache.prefix import Prefix
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import OVERFLOW, KVState, next_positions
from kvjax.types import LayerOps, Observation, Partial, PyTree, Stats, View


class _Block(NamedTuple):
    """The T new tokens of a head group, as attention and the cache take them.

    Attributes:
      queries: queries, with rotary positions.
      k: keys, likewise; under `rope_positions="cache"` they have none.
      v: values.
      slots: those claimed for the pairs; C for none.
    """

    queries: Queries
    k: Float[Array, "B K T D"]
    v: Float[Array, "B K T D"]
    slots: Int[Array, "B K T"]


def step_layer(
    index: int,
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K T D"],
    v: Float[Array, "B K T D"],
    ops: LayerOps,
    state: KVState,
    *,
    config: CacheSpec,
    n: Int[Array, "B"],
    tokens: Int[Array, "B T"] | None = None,
    is_prefill: bool,
    policy_params: PyTree = None,
    layer_number: int | Int[Array, ""] | None = None,
    head_numbers: Int[Array, "K"] | None = None,
    has_evicted: bool = False,
    prefix: Prefix | None = None,
) -> tuple[Float[Array, "B K G T D"], KVState]:
    """Appends T new tokens to one layer, and attends; each row's first `n` are real.

    Algorithm 1 (Batch-Max): a head whose live pairs and the new ones would exceed the
    budget evicts down to |kv| - `evict_size` pairs. Then the new pairs are appended,
    the queries attend to the kept pairs and, causally, to their own block, and the
    policy observes. Layers with a sliding window then evict what has left it, under
    any policy.

    Args:
      index: the layer's index in the state.
      q: queries, before rotary positions.
      k: keys, before rotary positions.
      v: values.
      ops: the layer's functions.
      state: before the tokens are appended.
      config: budgets, schedule, policy, layout and codec.
      n: real tokens per row.
      tokens: their ids; only for policies that need them.
      is_prefill: whether the tokens belong to the prompt: schedules differ there.
      policy_params: this layer's weights of a learned policy.
      layer_number: the layer's index in the model; None is `index`.
      head_numbers: the heads' numbers in the model's layer, if the state has not all.
      has_evicted: whether `eviction.evict_overflow` ran for this step already.
      prefix: the rows also attend to these pairs; its layer `index` is this one.
    """
    number = index if layer_number is None else layer_number
    inputs = eviction.PolicyInputs(ops.apply_rope, ops.scoring, policy_params, number)
    if not has_evicted:
        state = eviction.evict_overflow(
            state,
            {index: inputs},
            q.shape[3],
            config=config,
            n=n,
            is_prefill=is_prefill,
            head_numbers=head_numbers,
        )
    shared = None
    if prefix is not None:
        positions, turned = next_positions(state, q.shape[3]), ops.apply_rope(q)
        shared = prefixes.attend(prefix, index, turned, positions, ops.scoring)
    groups = eviction.groups_of(state, index)
    outputs = []
    for place, heads in groups:
        budget = config.budget and head_groups.size_of(config.budget[index], heads)
        out, state = _step_group(
            place,
            heads,
            eviction.view_maker(state, config, inputs, heads, budget, head_numbers),
            *(head_groups.take(x, heads) for x in (q, k, v)),
            head_groups.ops_of(ops, heads),
            state,
            config=config,
            window=config.window(index),
            recalls=config.recalls(index),
            n=n,
            tokens=tokens,
            is_prefill=is_prefill,
            shared=shared and Partial(*(head_groups.take(x, heads) for x in shared)),
        )
        outputs.append(out)
    return head_groups.concatenate(outputs, [heads for _, heads in groups]), state


def _step_group(
    place: int,
    heads: head_groups.Heads,
    view: Callable[..., View],
    q: Array,
    k: Array,
    v: Array,
    ops: LayerOps,
    state: KVState,
    *,
    config: CacheSpec,
    window: int,
    recalls: bool,
    n: Array,
    tokens: Array | None,
    is_prefill: bool,
    shared: Partial | None,
) -> tuple[Array, KVState]:
    """`step_layer` for one head group, after eviction.

    `shared` is the queries' attention to a prefix, if any.
    """
    layer, stats = state.layers[place], state.stats[place]
    last, layout = state.next_pos - 1, config.layout
    positions = next_positions(state, q.shape[3])
    before_rope = q
    if config.rope_positions == "original":
        q, k = ops.apply_rope(q), ops.apply_rope(k)
    else:
        q = ops.apply_rope(q, _next_slots(layout.live(layer), q.shape[3]))
    layer, per_slot, slots, overflow = layout.claim(layer, stats.per_slot, positions, n)
    stats = stats._replace(per_slot=per_slot)
    block = _Block(Queries(q, positions, n), k, v, slots)
    required = config.required_stats(is_prefill)
    attend = _recall if recalls and not is_prefill else _attend
    options = AttentionSpec(required, config.implementation, ops.scoring)
    layer, partial, observation = attend(layer, block, options, ops, config)
    if config.policy and (is_prefill or config.schedule.evicts_in_decode):
        extra = _model_stats(required, block, before_rope, tokens, ops)
        observation = observation._replace(is_prefill=is_prefill, **extra)
        now = view(layer, last + n, layout.live(layer))
        stats = config.policy.observe(stats, now, observation)
    if window:
        layer, stats = _evict_outside(window, layer, stats, last + n, config)
    state = eviction.with_error(state, OVERFLOW, overflow, heads).replace(
        layers=eviction.with_item(state.layers, place, layer),
        stats=eviction.with_item(state.stats, place, stats),
    )
    if shared is not None:
        partial = attention.merge(shared, partial)
    return attention.normalize(partial).astype(q.dtype), state


def _attend(
    layer: PyTree,
    block: _Block,
    options: AttentionSpec,
    ops: LayerOps,
    config: CacheSpec,
) -> tuple[PyTree, Partial, Observation]:
    """Writes the new pairs and attends, in one kernel if the layout has one."""
    layout, (queries, k, v, slots) = config.layout, block
    fuse = layout.write_attend if config.rope_positions == "original" else None
    if fuse and (both := fuse(layer, queries, k, v, slots, options)):
        return both
    layer = layout.write(layer, k, v, slots, queries.positions)
    rotate = None
    if config.rope_positions != "original":
        rotate = functools.partial(
            eviction.rotated_keys, apply_rope=ops.apply_rope, config=config
        )
    return layer, *layout.attend(layer, queries, options, rotate)


def _recall(
    layer: PyTree,
    block: _Block,
    options: AttentionSpec,
    ops: LayerOps,
    config: CacheSpec,
) -> tuple[PyTree, Partial, Observation]:
    """Writes the new pairs and attends, fetching few values from host memory."""
    layout, (queries, k, v, slots) = config.layout, block
    layer = layout.write_keys(layer, k, slots, queries.positions)
    keys = eviction.rotated_keys(layout.keys(layer), ops.apply_rope, config)
    pairs = Pairs(keys, None, layout.positions(layer))
    choice = offload.choose(queries, pairs, options, config.offload)
    fetched = choice.slots.reshape(*choice.slots.shape[:2], -1)
    layer, values = layout.exchange_values(layer, v, slots, queries.positions, fetched)
    return layer, offload.attended(choice, values, config.offload), choice.observation


def _evict_outside(
    window: int, layer: PyTree, stats: Stats, now: Int[Array, "B"], config: CacheSpec
) -> tuple[PyTree, Stats]:
    """Evicts pairs that the newest token does not see, as later tokens will not."""
    layout = config.layout
    positions = layout.positions(layer)
    hidden = (positions >= 0) & (positions <= now[:, None, None] - window)
    layer = layout.evict(layer, hidden)
    if config.eviction == "in_place":
        return layer, stats
    return eviction.compacted_if(jnp.any(hidden, axis=(1, 2)), layer, stats, layout)


def measure(
    index: int,
    before: Float[Array, "B T M"],
    after: Float[Array, "B T M"],
    state: KVState,
    *,
    config: CacheSpec,
    n: Int[Array, "B"],
) -> KVState:
    """Adds the budget rule's measurement of one layer's attention, over n tokens."""
    measured = config.budget_rule.measure(before, after).astype(jnp.float32)
    real = jnp.arange(measured.shape[1], dtype=jnp.int32)[None] < n[:, None]
    total = jnp.sum(measured, axis=1, where=real)
    return state.replace(measured=state.measured.at[:, index].add(total))


def _next_slots(live: Int[Array, "B K"], count: int) -> Int[Array, "B K T"]:
    """Returns the slots that the next `count` pairs of a compacted layer take."""
    return live[..., None] + jnp.arange(count, dtype=jnp.int32)[None, None]


def _model_stats(
    required: frozenset[str],
    block: _Block,
    before_rope: Array,
    tokens: Array | None,
    ops: LayerOps,
) -> dict[str, Array]:
    """Returns the required fields of an observation that attention does not compute."""

    def output_norm():
        added = jnp.abs(ops.value_contribution(block.v).astype(jnp.float32))
        return jnp.mean(jnp.sum(added, axis=-1), axis=2)

    known = {
        "queries": lambda: block.queries.q,
        "pre_rope_queries": lambda: before_rope,
        "output_norm": output_norm,
        "tokens": lambda: tokens,
        "hidden": lambda: ops.hidden,
    }
    return {name: known[name]() for name in required & known.keys()}
