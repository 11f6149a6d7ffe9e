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
    """Ring buffer of the last W queries of every row.

    Attributes:
      q: the queries, with rotary positions applied.
      after: position of each query plus 1; 0 for an entry without a query.
    """

    q: Float[Array, "B W K G D"]
    after: Int[Array, "B W"]


def recent_query_policy(
    name: str,
    window: int,
    score: Callable[[RecentQueries, View], Array],
    num_pinned: int,
) -> Policy:
    """Returns a policy that stores the last `window` queries of every row.

    Args:
      name: of the policy.
      window: number of queries, W.
      score: (queries, view) -> scores f32[B, K, C].
      num_pinned: see `Policy`.
    """

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
    # Padding gets an index beyond the ring, which mode="drop" ignores below.
    place = jnp.where(real_mask(observation, window), place, window)
    rows = jnp.arange(batch)[:, None]
    queries = rearrange(observation.queries, "b k g t d -> b t k g d")
    return RecentQueries(
        ring.q.at[rows, place].set(queries.astype(jnp.float32), mode="drop"),
        ring.after.at[rows, place].set(observation.positions + 1, mode="drop"),
    )


def attention_weights(ring: RecentQueries, view: View) -> Float[Array, "B K G W C"]:
    """Returns the attention weights of the stored queries over the live pairs.

    With the layer's soft cap and window (`View.scoring`). A query does not attend to
    pairs newer than itself or outside its window; entries without a query get zeros.
    """
    logits = scaled_products(ring, view)
    first_query = jnp.where(
        view.positions < 0, jnp.iinfo(jnp.int32).max, view.positions
    )
    visible = first_query[:, :, None, None] < ring.after[:, None, None, :, None]
    if view.scoring.local_window:
        visible = visible & in_window(ring, view)[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible, logits, -1e30), axis=-1)
    return jnp.where(visible, weights, 0.0)


def in_window(ring: RecentQueries, view: View) -> Bool[Array, "B K W C"]:
    """Returns which pairs are inside each stored query's window (`local_window`)."""
    since = ring.after - view.scoring.local_window
    return view.positions[:, :, None] >= since[:, None, :, None]


def scaled_products(ring: RecentQueries, view: View) -> Float[Array, "B K G W C"]:
    """Returns the scaled, soft-capped products of the stored queries and all keys."""
    keys = view.keys().astype(jnp.float32)
    scale = keys.shape[-1] ** -0.5
    found = scale * jnp.einsum("bwkgd,bkcd->bkgwc", ring.q, keys, precision="highest")
    cap = view.scoring.logits_soft_cap
    return cap * jnp.tanh(found / cap) if cap else found
