"""The compressed KV state of a batch: an immutable pytree of fixed shapes."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache import layouts, parts
from kvjax.cache.layouts import Layout
from kvjax.cache.parts import Heads
from kvjax.cache.spec import CacheSpec
from kvjax.parallel import axes, host
from kvjax.types import ModelSpec, PyTree, Stats, Struct, static_field

# Sticky error bits.
OVERFLOW = 1  # a pair found no empty slot
NAN_SCORE = 2  # a pair that could have gone had no score


class KVState(Struct):
    """Everything that is remembered of a batch's tokens.

    Attributes:
      layers: the layout's, one for every part of every layer, see `kvjax.cache.parts`;
        their capacities may differ.
      stats: the policy's statistics, likewise.
      next_pos: i32[B], tokens each row has seen; the position of its next token.
      error: u32[B, K], sticky bits; see `raise_errors`.
      measured: f32[B, L], sums over the prompt's tokens of what the budget rule
        measures in every layer; None where it measures nothing.
      layout: of the layers.
      heads: those of every part of every layer.
    """

    layers: tuple[PyTree, ...]
    stats: tuple[Stats, ...]
    next_pos: Array
    error: Array
    measured: Array | None = None
    layout: Layout = static_field(default=layouts.DEFAULT)
    heads: tuple[tuple[Heads, ...], ...] = static_field(default=())

    def parts(self, index: int) -> list[tuple[int, Heads]]:
        """Of a layer: each part's place in `layers` and `stats`, and its heads."""
        first = sum(map(len, self.heads[:index]))
        return list(enumerate(self.heads[index], first))

    def of_layer(self, index: int) -> "KVState":
        """The state of a model with that layer alone; nothing is measured there."""
        places = [place for place, _ in self.parts(index)]
        return self.replace(
            layers=tuple(self.layers[place] for place in places),
            stats=tuple(self.stats[place] for place in places),
            heads=(self.heads[index],),
            measured=None,
        )


def init(
    spec: ModelSpec,
    config: CacheSpec,
    batch: int,
    capacity: tuple[int, ...],
    dtype: jnp.dtype = jnp.float32,
) -> KVState:
    """An empty state with `capacity` slots per head of every part of every layer.

    With `jax.eval_shape` this gives the exact bytes without allocating them.
    """
    layout, policy = config.layout, config.policy
    heads = config.heads(spec)
    specs = [parts.spec_of(spec, part) for layer in heads for part in layer]
    stored = [config.codec_of(i) for i, layer in enumerate(heads) for _ in layer]
    sizes = list(zip(specs, capacity, strict=True))
    layers = tuple(
        layout.init(s, batch, c, codec, dtype)
        for (s, c), codec in zip(sizes, stored, strict=True)
    )
    stats = tuple(policy.init(s, batch, c) if policy else Stats() for s, c in sizes)
    return KVState(
        layers=layers,
        stats=stats,
        next_pos=jnp.zeros((batch,), jnp.int32),
        error=jnp.zeros((batch, spec.num_kv_heads), jnp.uint32),
        measured=jnp.zeros((batch, len(heads))) if config.measures else None,
        layout=layout,
        heads=heads,
    )


def capacities(state: KVState) -> tuple[int, ...]:
    """Slots per head of every part of every layer."""
    return tuple(state.layout.capacity(layer) for layer in state.layers)


def next_positions(state: KVState, count: int) -> Int[Array, "B T"]:
    """Positions of the next `count` tokens of every row."""
    return state.next_pos[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]


def advance(state: KVState, n: Int[Array, "B"]) -> KVState:
    """Counts the `n` tokens of each row that every layer has now seen."""
    return state.replace(next_pos=state.next_pos + n)


def insert(
    state: KVState, other: KVState, rows: Int[Array, "N"] | Int[Array, ""] | int
) -> KVState:
    """Copies each of the N rows of `other` to the row of the state that `rows` names.

    A row of B or more is dropped; no other may be named twice. `other` stays valid and
    may be inserted again, for several continuations of one prompt.

    Args:
      state: B rows.
      other: N rows of the same capacities.
      rows: one per row of `other`; or one number, the first of N neighbouring rows.
    """
    rows = jnp.asarray(rows, jnp.int32)
    if not rows.ndim:
        rows = rows + jnp.arange(len(other.next_pos), dtype=jnp.int32)
    put = lambda mine, new: host.insert(mine, new, rows)
    rest = jax.tree.map(put, state.replace(layers=()), other.replace(layers=()))
    layers = zip(state.layers, other.layers, strict=True)
    return rest.replace(
        layers=tuple(state.layout.insert(mine, new, rows) for mine, new in layers)
    )


def release(state: KVState, rows: Int[Array, "N"]) -> KVState:
    """Evicts all pairs of these rows, which are then empty until the next `insert`.

    Error bits stay, and so do the policy's statistics of rows, which `insert` replaces.
    A row of B or more is dropped.
    """
    return state.replace(
        layers=tuple(state.layout.release(layer, rows) for layer in state.layers),
        next_pos=state.next_pos.at[rows].set(0, mode="drop"),
    )


def kept_positions(state: KVState) -> list[list[list[np.ndarray]]]:
    """Positions of the kept pairs in rising order: `[row][layer][head]`."""
    held = [axes.to_host(state.layout.positions(layer)) for layer in state.layers]
    layers = [_heads_of(state, index, held) for index in range(len(state.heads))]
    return [
        [[np.sort(head[row][head[row] >= 0]) for head in layer] for layer in layers]
        for row in range(held[0].shape[0])
    ]


def _heads_of(
    state: KVState, index: int, held: list[np.ndarray]
) -> list[Int[np.ndarray, "B C"]]:
    """Every head's positions, in the order of the heads."""
    found = {}
    for place, heads in state.parts(index):
        here = range(held[place].shape[1]) if heads is None else heads
        found |= {head: held[place][:, i] for i, head in enumerate(here)}
    return [found[head] for head in sorted(found)]


def stored_bytes(state: KVState) -> tuple[int, int]:
    """Returns the bytes of live keys and values, and the bytes allocated for them.

    A policy that keeps fewer pairs than the budget leaves slots empty, which stay
    allocated.
    """
    live, allocated = zip(*map(state.layout.nbytes, state.layers), strict=True)
    return sum(live), sum(allocated)


def raise_errors(state: KVState) -> None:
    """Turns the sticky bits into an exception that names the cause.

    Raises:
      RuntimeError: the state was driven past its capacity, or a policy's scores were
        NaN where it had to choose.
    """
    bits = np.bitwise_or.reduce(axes.to_host(state.error), axis=1)  # of each row
    if np.any(bits & NAN_SCORE):
        raise RuntimeError(
            "the policy's score was NaN for pairs that it had to choose among, in rows "
            f"{np.flatnonzero(bits & NAN_SCORE).tolist()} of the batch: its score has "
            "to be a number, or infinite, for every live pair (view.positions >= 0)"
        )
    if np.any(bits & OVERFLOW):
        raise RuntimeError(
            "a pair found no empty slot (slots per layer "
            f"{sorted(set(capacities(state)))}, tokens seen "
            f"{jax.device_get(state.next_pos).tolist()}): the state was allocated for "
            "fewer tokens than it was given"
        )
