"""The one transition of a KV state: make room, append, attend, observe.

Shapes never change, so the state is carried through `lax` loops and donated. How much
each layer holds, when it evicts and by which policy is a `CacheSpec`, static; where
and how pairs lie is the business of its layout and codec.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import attention
from kvjax.cache import eviction, offload, parts
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import OVERFLOW, KVState, next_positions
from kvjax.types import LayerOps, PyTree, Stats, View


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
    has_room: bool = False,
) -> tuple[Float[Array, "B K G T D"], KVState]:
    """One layer's transition for T new tokens, of which each row's first `n` are real.

    Algorithm 1 (Batch-Max): where a head's live pairs and the new ones would exceed the
    budget, it drops all but |kv| - `evict_size` pairs; then the new pairs are appended;
    then the queries see the kept pairs and, causally, their own block; then the policy
    observes. Layers with a sliding window then drop what has left it, whatever the
    policy.

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
      has_room: whether `make_room` was called for this step's layers already.
    """
    number = index if layer_number is None else layer_number
    if not has_room:
        lent = eviction.Lent(ops.apply_rope, ops.scoring, policy_params, number)
        state = eviction.make_room(
            *(state, {index: lent}, q.shape[3]),
            config=config,
            n=n,
            is_prefill=is_prefill,
            head_numbers=head_numbers,
        )
    places = eviction.parts_of(state, index)
    found = []
    for place, heads in places:
        size = config.budget and parts.size_of(config.budget[index], heads)
        view = functools.partial(
            eviction.view_of,
            apply_rope=ops.apply_rope,
            scoring=ops.scoring,
            config=config,
            number=number,
            params=policy_params,
            heads=eviction.numbers_of_heads(q.shape[1], heads, head_numbers),
            budget=size,
        )
        out, state = _step_part(
            *(place, heads, view),
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
) -> tuple[Array, KVState]:
    """`step_layer` for heads that keep the same number of pairs."""
    layer, stats = state.layers[place], state.stats[place]
    last, layout, schedule = state.next_pos - 1, config.layout, config.schedule
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
        layer, stats = _only_in(window, layer, stats, last + n, config)
    state = eviction.noted(state, OVERFLOW, overflow, heads).replace(
        layers=eviction.with_item(state.layers, place, layer),
        stats=eviction.with_item(state.stats, place, stats),
    )
    return attention.normalize(partial).astype(q.dtype), state


def _attended(
    layer, q, k, v, slots, positions, n, wanted, ops: LayerOps, config: CacheSpec
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
        turned = functools.partial(
            eviction.turned, apply_rope=ops.apply_rope, config=config
        )
    return layer, *layout.attend(layer, q, positions, n, *how, turned)


def _recalled(
    layer, q, k, v, slots, positions, n, wanted, ops: LayerOps, config: CacheSpec
):
    """`_attended` with the values of few pairs, which come from host memory."""
    layout = config.layout
    layer = layout.write_keys(layer, k, slots, positions)
    keys = eviction.turned(layout.keys(layer), ops.apply_rope, config)
    given = q, keys, layout.positions(layer), positions, n, wanted, ops.scoring
    choice = offload.choose(*given, config.offload)
    wanted = choice.slots.reshape(*choice.slots.shape[:2], -1)
    layer, values = layout.exchange_values(layer, v, slots, positions, wanted)
    return layer, offload.attended(choice, values, config.offload), choice.seen


def _only_in(
    window: int, layer: PyTree, stats: Stats, now: Int[Array, "B"], config: CacheSpec
) -> tuple[PyTree, Stats]:
    """The layer with what the newest token sees: later ones see nothing before it."""
    layout = config.layout
    positions = layout.positions(layer)
    hidden = (positions >= 0) & (positions <= now[:, None, None] - window)
    layer = layout.evict(layer, hidden)
    if config.eviction == "in_place":
        return layer, stats
    return eviction.tidied(layer, stats, jnp.any(hidden, axis=(1, 2)), layout)


def measure(
    index: int,
    before: Float[Array, "B T M"],
    after: Float[Array, "B T M"],
    state: KVState,
    *,
    config: CacheSpec,
    n: Int[Array, "B"],
) -> KVState:
    """Adds up what the budget rule sees in one layer's attention of n real tokens."""
    found = config.budget_rule.measure(before, after).astype(jnp.float32)
    real = jnp.arange(found.shape[1], dtype=jnp.int32)[None] < n[:, None]
    total = jnp.sum(found, axis=1, where=real)
    return state.replace(measured=state.measured.at[:, index].add(total))


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
