"""The compressed KV state and its one transition: make room, append, attend, observe.

Shapes never change, so the state is carried through `lax` loops and donated. How much
each layer holds, when it evicts and by which policy is a `Compression`, static.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import attention, codecs
from kvjax.layouts import dense
from kvjax.policies import base
from kvjax.types import EMPTY, ModelSpec, PyTree, Schedule, UserError, View

OVERFLOW = 1  # sticky error bit: a pair found no empty slot
ROOMS = ("reuse", "gather")


@dataclasses.dataclass(frozen=True)
class Compression:
    """What is kept of a KV cache, and how; hashable, a static argument.

    Build it with `compression`, which checks that the parts fit each other.

    Attributes:
      policy: which pairs stay; None only for the full cache.
      schedule: when pairs go.
      budget: |kv|, pairs per head, one per layer; None only for the full cache.
      codec: how pairs are stored.
      room: how a layer makes room. `reuse` marks victims empty and lets new pairs move
        into their slots; `gather` moves the kept pairs to the front. The same pairs
        stay either way.
      rows: rows whose evictions are worked out together while decoding. Rows of a
        ragged batch fill up at different steps; handling only those that are full, a
        few at a time, makes the cost of a row's evictions independent of the others.
    """

    policy: base.Policy | None
    schedule: Schedule
    budget: tuple[int, ...] | None
    codec: codecs.Codec = codecs.identity
    room: str = "reuse"
    rows: int = 4

    @property
    def needs(self) -> frozenset[str]:
        return self.policy.needs if self.policy else frozenset()

    def prefill_capacity(
        self, spec: ModelSpec, prompt: int, new: int
    ) -> tuple[int, ...]:
        """Slots per layer while prompts of up to `prompt` tokens are read."""
        if self.schedule.evicts_in_prefill:
            return self.budget
        return (prompt if self.schedule.compacts else prompt + new,) * spec.num_layers

    def decode_capacity(
        self, spec: ModelSpec, prompt: int, new: int
    ) -> tuple[int, ...]:
        """Slots per layer while `new` tokens are generated."""
        if self.schedule.evicts_in_decode:
            return self.budget
        if self.schedule.compacts:
            return tuple(budget + new for budget in self.budget)
        return self.prefill_capacity(spec, prompt, new)


def compression(
    spec: ModelSpec,
    policy: base.Policy | None,
    budget: int | tuple[int, ...] | None,
    schedule: Schedule | None = None,
    **options,
) -> Compression:
    """Checks the parts against each other and joins them.

    Args:
      spec: the model's shape.
      policy: None is the full cache.
      budget: |kv| per head: one int for all layers or one int per layer.
      schedule: None is Batch-Max's Algorithm 1, or the full cache without a policy.
      **options: `codec`, `room`, `rows` of `Compression`.

    Raises:
      UserError: a budget of 0, not larger than one block, or filled by pinned pairs; a
        number of budgets other than the layers; a policy without a budget.
    """
    if policy is None:
        schedule = schedule or Schedule("full")
        if schedule.phases != "full" or budget is not None:
            raise UserError(
                "policy=None is the full cache, without a budget and with the schedule "
                f"'full': got budget {budget} and {schedule.phases!r}; name a policy"
            )
        return Compression(None, schedule, None, **options)
    schedule = schedule or Schedule()
    if schedule.phases == "full" or budget is None:
        raise UserError(
            f"policy {policy.name!r} needs a budget (got {budget}) and a schedule that "
            f"evicts (got {schedule.phases!r})"
        )
    base.checked(policy)
    budgets = (budget,) * spec.num_layers if isinstance(budget, int) else tuple(budget)
    if len(budgets) != spec.num_layers:
        raise UserError(
            f"{len(budgets)} budgets for the {spec.num_layers} layers of {spec.name}: "
            "give one int, or one per layer"
        )
    for budget in set(budgets):
        check_budget(budget, policy, schedule)
    made = Compression(policy, schedule, budgets, **options)
    if made.room not in ROOMS or made.rows < 1:
        raise UserError(
            f"room={made.room!r}, rows={made.rows}: room is one of {ROOMS}, rows >= 1"
        )
    return made


def check_budget(budget: int, policy: base.Policy, schedule: Schedule) -> None:
    """Raises UserError if the policy cannot work under so small a budget."""
    if budget < 1:
        raise UserError(f"budget {budget}: a head must keep at least 1 pair")
    step = schedule.evict if schedule.evicts_in_decode else 0
    if schedule.evicts_in_prefill:
        if schedule.evict < schedule.block:
            raise UserError(
                f"schedule evict={schedule.evict} makes no room for a block of "
                f"{schedule.block} tokens: raise evict or lower block"
            )
        step = max(step, schedule.block)
    least = least_kept(budget, schedule)
    if budget <= step or least < 0:
        raise UserError(
            f"budget {budget} must be larger than the {step} pairs that one eviction "
            "drops: raise the budget, or lower the schedule's block and evict"
        )
    if policy.pinned and policy.pinned >= max(least, 1):
        raise UserError(
            f"policy {policy.name!r} pins {policy.pinned} pairs, but an eviction at "
            f"budget {budget} leaves {least}: raise the budget or pin fewer"
        )


def least_kept(budget: int, schedule: Schedule) -> int:
    """The fewest pairs per head that an eviction at this budget leaves."""
    if not schedule.evicts_in_decode:
        return budget
    if not schedule.evicts_in_prefill:
        return budget - schedule.evict
    if schedule.evict % schedule.block:
        return budget - schedule.block + 1 - schedule.evict
    return budget // schedule.block * schedule.block - schedule.evict


@flax.struct.dataclass
class KVState:
    """Everything that generation remembers of a batch.

    Attributes:
      layers: one `DenseLayer` per layer; their capacities may differ.
      stats: the policy's statistics, one pytree per layer.
      next_pos: i32[B], tokens each row has seen; the position of its next token.
      error: u32, sticky bits; see `raise_errors`.
    """

    layers: tuple[dense.DenseLayer, ...]
    stats: tuple[PyTree, ...]
    next_pos: Int[Array, "B"]
    error: Int[Array, ""]


def init(
    spec: ModelSpec,
    made: Compression,
    batch: int,
    capacity: tuple[int, ...],
    dtype: jnp.dtype = jnp.float32,
) -> KVState:
    """An empty state with `capacity` slots per head and layer.

    With `jax.eval_shape` this gives the exact bytes without allocating them.
    """
    layers = tuple(dense.init(spec, batch, c, made.codec, dtype) for c in capacity)
    stats = tuple(
        made.policy.init(spec, batch, c) if made.policy else () for c in capacity
    )
    return KVState(
        layers=layers,
        stats=stats,
        next_pos=jnp.zeros((batch,), jnp.int32),
        error=jnp.zeros((), jnp.uint32),
    )


def step_layer(
    index: int,
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K T D"],
    v: Float[Array, "B K T D"],
    state: KVState,
    *,
    made: Compression,
    n: Int[Array, "B"],
    evict: bool,
) -> tuple[Float[Array, "B K G T D"], KVState]:
    """One layer's transition for T new tokens, of which each row's first `n` are real.

    Algorithm 1 (Batch-Max): where a row's live pairs and the new ones would exceed the
    budget, `evict` pairs per head go; then the new pairs are appended; then the
    queries see the kept pairs and, causally, their own block; then the policy observes.
    """
    layer, stats, error = state.layers[index], state.stats[index], state.error
    last = state.next_pos - 1
    if evict:
        held = dense.live(layer)[:, 0]
        full = held + n > made.budget[index]
        drop = jnp.where(full & (n > 0), made.schedule.evict, 0)
        rows = made.rows if q.shape[3] == 1 else q.shape[0]
        layer, stats = make_room(layer, stats, drop, last, made, rows)
    positions = next_positions(state, q.shape[3])
    layer, stats, overflow = dense.append(layer, stats, made.codec, k, v, positions, n)
    keys, values = made.codec.decode(layer.k), made.codec.decode(layer.v)
    partial, seen = attention.attend(
        q, keys, values, layer.pos, positions, n, made.needs
    )
    if made.policy:
        view = _view(layer, made.codec, last + n, dense.live(layer)[:, 0])
        stats = made.policy.observe(stats, view, seen)
    error = error | jnp.where(overflow, jnp.uint32(OVERFLOW), jnp.uint32(0))
    state = state.replace(
        layers=_set(state.layers, index, layer),
        stats=_set(state.stats, index, stats),
        error=error,
    )
    return attention.finish(partial).astype(q.dtype), state


def make_room(
    layer: dense.DenseLayer,
    stats: PyTree,
    drop: Int[Array, "B"],
    now: Int[Array, "B"],
    made: Compression,
    rows: int,
) -> tuple[dense.DenseLayer, PyTree]:
    """Drops the `drop` least important pairs of every head of every row.

    Works through the rows that drop anything, `rows` of them at a time, and costs
    next to nothing when there are none.
    """
    layer = layer.replace(pos=_victims_gone(layer, stats, drop, now, made, rows))
    if made.room == "reuse":
        return layer, stats
    return jax.lax.cond(
        jnp.any(drop > 0),
        lambda: dense.compact(layer, stats, layer.pos.shape[2]),
        lambda: (layer, stats),
    )


def compact(state: KVState, made: Compression, capacity: tuple[int, ...]) -> KVState:
    """Shrinks (or grows) the state between prefill and decode.

    Rows that hold more than the schedule lets into decoding drop their least important
    pairs first: to the budget (`after_prefill`), or to the room that the first decoded
    token would make (`decode`).
    """
    layers, stats = [], []
    for index, (layer, stat) in enumerate(zip(state.layers, state.stats, strict=True)):
        if made.policy:
            budget, held = made.budget[index], dense.live(layer)[:, 0]
            if made.schedule.evicts_in_decode:
                target = jnp.where(held >= budget, budget - made.schedule.evict, held)
            else:
                target = jnp.minimum(held, budget)
            layer, stat = make_room(
                layer, stat, held - target, state.next_pos - 1, made, held.shape[0]
            )
        layer, stat = dense.compact(layer, stat, capacity[index])
        layers.append(layer)
        stats.append(stat)
    return state.replace(layers=tuple(layers), stats=tuple(stats))


def next_positions(state: KVState, count: int) -> Int[Array, "B T"]:
    """Positions of the next `count` tokens of every row."""
    return state.next_pos[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]


def advance(state: KVState, n: Int[Array, "B"]) -> KVState:
    """Counts the `n` tokens of each row that every layer has now seen."""
    return state.replace(next_pos=state.next_pos + n)


def kept_positions(state: KVState) -> list[list[list[np.ndarray]]]:
    """Positions of the kept pairs in rising order: `[row][layer][head]`."""
    held = [jax.device_get(layer.pos) for layer in state.layers]
    return [
        [[np.sort(head[head >= 0]) for head in layer[row]] for layer in held]
        for row in range(held[0].shape[0])
    ]


def raise_errors(state: KVState) -> None:
    """Turns the sticky bits into an exception that names the cause.

    Raises:
      RuntimeError: the state was driven past its capacity.
    """
    if int(state.error) & OVERFLOW:
        capacity = [layer.pos.shape[2] for layer in state.layers]
        raise RuntimeError(
            f"a pair found no empty slot (slots per layer {sorted(set(capacity))}, "
            f"tokens seen {jax.device_get(state.next_pos).tolist()}): the state was "
            "allocated for fewer tokens than it was given"
        )


def _victims_gone(layer, stats, drop, now, made, rows) -> Int[Array, "B K C"]:
    """The layer's positions with those of the victims set to empty."""
    batch = drop.shape[0]

    def choose(layer, stats, drop, now):
        view = _view(layer, made.codec, now, dense.live(layer)[:, 0] - drop)
        gone = base.evictions(made.policy.score(stats, view), layer.pos, drop)
        return jnp.where(gone, EMPTY, layer.pos)

    if rows >= batch:
        return jax.lax.cond(
            jnp.any(drop > 0),
            lambda: choose(layer, stats, drop, now),
            lambda: layer.pos,
        )

    def some_rows(carry):
        pos, drop = carry
        chosen = jnp.argsort(drop == 0, stable=True)[:rows]
        held, seen = jax.tree.map(lambda leaf: leaf[chosen], (layer, stats))
        new = choose(held.replace(pos=pos[chosen]), seen, drop[chosen], now[chosen])
        return pos.at[chosen].set(new), drop.at[chosen].set(0)

    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[1] > 0), some_rows, (layer.pos, drop)
    )[0]


def _view(layer: dense.DenseLayer, codec: codecs.Codec, now: Array, keep: Array):
    return View(
        pos=layer.pos,
        now=now,
        keep=keep,
        keys=lambda: codec.decode(layer.k),
        values=lambda: codec.decode(layer.v),
    )


def _set(items: tuple, index: int, item) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
