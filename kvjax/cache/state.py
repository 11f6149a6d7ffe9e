"""The compressed KV state of a batch: an immutable pytree of fixed shapes."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache import head_groups, layouts
from kvjax.cache.head_groups import Heads
from kvjax.cache.layouts import Layout
from kvjax.cache.spec import CacheSpec
from kvjax.parallel import axes, host
from kvjax.types import ModelSpec, PyTree, Stats, Struct, static_field

# Sticky error bits.
OVERFLOW = 1  # a new pair found no empty slot
NAN_SCORE = 2  # the policy's score was NaN for a pair that could be evicted


class KVState(Struct):
    """The KV pairs of a batch, with the policy's statistics of them.

    Attributes:
      layers: the layout's pytrees, one for every head group of every layer (see
        `kvjax.cache.head_groups`); their capacities may differ.
      stats: the policy's statistics, one for every head group.
      next_pos: i32[B], tokens each row has read: the position of its next token.
      error: u32[B, K], sticky bits; see `raise_errors`.
      measured: f32[B, L], the budget rule's measurements of every layer, summed over
        the prompt's tokens; None if it measures nothing.
      layout: of all layers.
      heads: the head groups of every layer, each a tuple of its heads.
    """

    layers: tuple[PyTree, ...]
    stats: tuple[Stats, ...]
    next_pos: Array
    error: Array
    measured: Array | None = None
    layout: Layout = static_field(default=layouts.DEFAULT)
    heads: tuple[tuple[Heads, ...], ...] = static_field(default=())

    def head_groups(self, index: int) -> list[tuple[int, Heads]]:
        """Returns each head group of a layer: its index in `layers`, and its heads."""
        first = sum(map(len, self.heads[:index]))
        return list(enumerate(self.heads[index], first))

    def of_layer(self, index: int) -> "KVState":
        """Returns the state of one layer alone, without measurements."""
        places = [place for place, _ in self.head_groups(index)]
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
    """Returns an empty state; `capacity` has the slots per head of every head group.

    Under `jax.eval_shape` it gives the exact bytes without allocating them.
    """
    layout, policy = config.layout, config.policy
    heads = config.heads(spec)
    specs = [head_groups.spec_of(spec, group) for layer in heads for group in layer]
    codecs = [config.codec_of(i) for i, layer in enumerate(heads) for _ in layer]
    sizes = list(zip(specs, capacity, strict=True))
    layers = tuple(
        layout.init(s, batch, c, codec, dtype)
        for (s, c), codec in zip(sizes, codecs, strict=True)
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
    """Returns the slots per head of every head group of every layer."""
    return tuple(state.layout.capacity(layer) for layer in state.layers)


def next_positions(state: KVState, count: int) -> Int[Array, "B T"]:
    """Returns the positions of the next `count` tokens of every row."""
    return state.next_pos[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]


def advance(state: KVState, n: Int[Array, "B"]) -> KVState:
    """Moves the next position of each row past `n` tokens that every layer has read."""
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


def select(state: KVState, rows: Int[Array, "N"]) -> KVState:
    """Returns a state of these rows, for reading alone: `insert` copies it elsewhere.

    A row may be named several times, but none of B or more.
    """
    take = lambda leaf: host.rows(leaf, rows)
    rest = jax.tree.map(take, state.replace(layers=()))
    layers = tuple(state.layout.rows(layer, rows) for layer in state.layers)
    return rest.replace(layers=layers)


def release(state: KVState, rows: Int[Array, "N"]) -> KVState:
    """Evicts all pairs of these rows, which are then empty until the next `insert`.

    Error bits stay, and so do the policy's statistics of rows, which `insert` replaces.
    A row of B or more is dropped.
    """
    return state.replace(
        layers=tuple(state.layout.release(layer, rows) for layer in state.layers),
        next_pos=state.next_pos.at[rows].set(0, mode="drop"),
    )


def kept_positions(
    state: KVState, row: int | None = None
) -> list[list[list[np.ndarray]]]:
    """Returns the kept pairs' positions in ascending order, [row][layer][head].

    Args:
      state: of any batch.
      row: the only row to return; None is all.
    """
    if row is None:
        positions = tuple(map(state.layout.positions, state.layers))
    else:
        positions = _positions_of(state, np.asarray([row], np.int32))
    positions = axes.to_host(positions)
    layers = [_by_head(state, index, positions) for index in range(len(state.heads))]
    return [
        [[np.sort(head[row][head[row] >= 0]) for head in layer] for layer in layers]
        for row in range(len(positions[0]))
    ]


@jax.jit
def _positions_of(state: KVState, rows: Int[Array, "N"]) -> tuple[Array, ...]:
    """Returns the positions of these rows' slots in every head group."""
    layout = state.layout
    return tuple(layout.positions(layout.rows(layer, rows)) for layer in state.layers)


def _by_head(
    state: KVState, index: int, positions: tuple[np.ndarray, ...]
) -> list[Int[np.ndarray, "B C"]]:
    """Returns the positions of each head of a layer, in the order of the heads."""
    by_head = {}
    for place, heads in state.head_groups(index):
        group = positions[place]
        heads = range(group.shape[1]) if heads is None else heads
        by_head |= {head: group[:, i] for i, head in enumerate(heads)}
    return [by_head[head] for head in sorted(by_head)]


def stored_bytes(state: KVState) -> tuple[int, int]:
    """Returns the bytes of live keys and values, and the bytes allocated for them.

    A policy that keeps fewer pairs than the budget leaves slots empty, which stay
    allocated.
    """
    live, allocated = zip(*map(state.layout.nbytes, state.layers), strict=True)
    return sum(live), sum(allocated)


def raise_errors(state: KVState) -> None:
    """Raises an exception that names the cause if a sticky error bit is set.

    Raises:
      RuntimeError: more tokens were appended than the state has slots for, or a
        policy's scores were NaN where it had to evict.
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
