"""The last queries of every row, as SnapKV, R-KV and SimLayerKV remember them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from kvjax.policies.base import Policy, real_mask
from kvjax.types import Observation, Stats, View


class RecentQueries(NamedTuple):
    """The last W queries of every row, in a ring.

    Attributes:
      q: the queries, as attention sees them.
      after: position of each query plus 1; 0 where there is none yet.
    """

    q: Float[Array, "B W K G D"]
    after: Int[Array, "B W"]


def recent_query_policy(
    name: str,
    window: int,
    score: Callable[[RecentQueries, View], Array],
    num_pinned: int,
) -> Policy:
    """A policy over the last `window` queries of every row."""

    def init(spec, batch, capacity):
        heads = spec.num_kv_heads, spec.queries_per_kv_head, spec.head_dim
        queries = jnp.zeros((batch, window, *heads), jnp.float32)
        return Stats(
            per_row=RecentQueries(queries, jnp.zeros((batch, window), jnp.int32))
        )

    return Policy(
        init=init,
        observe=lambda stats, view, observation: Stats(
            per_row=_remember(stats.per_row, observation)
        ),
        score=lambda stats, view: score(stats.per_row, view),
        required_stats=frozenset({"queries"}),
        name=name,
        num_pinned=num_pinned,
    )


def _remember(ring: RecentQueries, observation: Observation) -> RecentQueries:
    """Writes the newest real queries over the oldest ones."""
    batch, window = ring.after.shape
    place = observation.positions % window
    place = jnp.where(real_mask(observation, window), place, window)  # beyond: dropped
    rows = jnp.arange(batch)[:, None]
    queries = rearrange(observation.queries, "b k g t d -> b t k g d")
    return RecentQueries(
        ring.q.at[rows, place].set(queries.astype(jnp.float32), mode="drop"),
        ring.after.at[rows, place].set(observation.positions + 1, mode="drop"),
    )


def attention_weights(ring: RecentQueries, view: View) -> Float[Array, "B K G W C"]:
    """Attention weights of the remembered queries over the live pairs.

    As the layer has them (`View.scoring`). A query does not see pairs newer than itself
    or beyond the layer's window; a place without a query has no weight.
    """
    logits = scaled_products(ring, view)
    seen_from = jnp.where(view.positions < 0, jnp.iinfo(jnp.int32).max, view.positions)
    visible = seen_from[:, :, None, None] < ring.after[:, None, None, :, None]
    if view.scoring.local_window:
        visible = visible & in_window(ring, view)[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible, logits, -1e30), axis=-1)
    return jnp.where(visible, weights, 0.0)


def in_window(ring: RecentQueries, view: View) -> Bool[Array, "B K W C"]:
    """Which slots' pairs are in each remembered query's window, in a layer with one."""
    since = ring.after - view.scoring.local_window
    return view.positions[:, :, None] >= since[:, None, :, None]


def scaled_products(ring: RecentQueries, view: View) -> Float[Array, "B K G W C"]:
    """Scaled products of the remembered queries and all slots' keys, capped if any."""
    keys = view.keys().astype(jnp.float32)
    scale = keys.shape[-1] ** -0.5
    found = scale * jnp.einsum("bwkgd,bkcd->bkgwc", ring.q, keys, precision="highest")
    cap = view.scoring.logits_soft_cap
    return cap * jnp.tanh(found / cap) if cap else found
