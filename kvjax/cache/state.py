"""The compressed KV state of a batch: an immutable pytree of fixed shapes."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from kvjax.cache.config import CacheConfig
from kvjax.cache.layouts import dense
from kvjax.parallel import axes
from kvjax.types import ModelSpec, Stats

OVERFLOW = 1  # sticky error bit: a pair found no empty slot


@flax.struct.dataclass
class KVState:
    """Everything that generation remembers of a batch.

    Attributes:
      layers: one `DenseLayer` per layer; their capacities may differ.
      stats: the policy's statistics, one per layer.
      next_pos: i32[B], tokens each row has seen; the position of its next token.
      error: u32[B, K], sticky bits; see `raise_errors`.
    """

    layers: tuple[dense.DenseLayer, ...]
    stats: tuple[Stats, ...]
    next_pos: Int[Array, "B"]
    error: UInt32[Array, "B K"]


def init(
    spec: ModelSpec,
    config: CacheConfig,
    batch: int,
    capacity: tuple[int, ...],
    dtype: jnp.dtype = jnp.float32,
) -> KVState:
    """An empty state with `capacity` slots per head and layer.

    With `jax.eval_shape` this gives the exact bytes without allocating them.
    """
    layers = tuple(dense.init(spec, batch, c, config.codec, dtype) for c in capacity)
    stats = tuple(
        config.policy.init(spec, batch, c) if config.policy else Stats()
        for c in capacity
    )
    return KVState(
        layers=layers,
        stats=stats,
        next_pos=jnp.zeros((batch,), jnp.int32),
        error=jnp.zeros((batch, spec.num_kv_heads), jnp.uint32),
    )


def next_positions(state: KVState, count: int) -> Int[Array, "B T"]:
    """Positions of the next `count` tokens of every row."""
    return state.next_pos[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]


def advance(state: KVState, n: Int[Array, "B"]) -> KVState:
    """Counts the `n` tokens of each row that every layer has now seen."""
    return state.replace(next_pos=state.next_pos + n)


def kept_positions(state: KVState) -> list[list[list[np.ndarray]]]:
    """Positions of the kept pairs in rising order: `[row][layer][head]`."""
    held = [axes.to_host(layer.positions) for layer in state.layers]
    return [
        [[np.sort(head[head >= 0]) for head in layer[row]] for layer in held]
        for row in range(held[0].shape[0])
    ]


def pair_bytes(state: KVState) -> tuple[int, int]:
    """Bytes of the keys and values that are live, and those allocated for them.

    A rule that keeps fewer pairs than the budget in some heads leaves slots empty: they
    hold nothing, and stay allocated.
    """
    live, allocated = 0, 0
    for layer in state.layers:
        stored = sum(leaf.nbytes for leaf in jax.tree.leaves((layer.k, layer.v)))
        allocated += stored
        live += int(jnp.sum(layer.positions >= 0)) * stored // layer.positions.size
    return live, allocated


def raise_errors(state: KVState) -> None:
    """Turns the sticky bits into an exception that names the cause.

    Raises:
      RuntimeError: the state was driven past its capacity.
    """
    if int(jnp.max(state.error)) & OVERFLOW:
        capacity = [layer.positions.shape[2] for layer in state.layers]
        raise RuntimeError(
            f"a pair found no empty slot (slots per layer {sorted(set(capacity))}, "
            f"tokens seen {jax.device_get(state.next_pos).tolist()}): the state was "
            "allocated for fewer tokens than it was given"
        )
