"""Rules that ask the newest queries which pairs they look at."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from kvjax.policies.base import (
    Policy,
    check_choice,
    check_counts,
    memoized,
    real_mask,
    recent_mask,
    zeros_per_slot,
)
from kvjax.policies.combinators import check_pooling, chunked, shared_heads
from kvjax.policies.ordering import pooled
from kvjax.types import Observation, Stats, View


@memoized
def tova(shared: bool = True) -> Policy:
    """Keeps what the last query looks at.

        score = weights of the last query, averaged over the G query heads
                (shared: and over the K KV heads, one choice for all of them)

    The newest pair competes like any other; `protect(tova(), 0, 1)` keeps it.

    Args:
      shared: one choice for a whole layer, as in the paper, or one for each KV head,
        the paper's ablation.

    Needs: last_attn, one row of the attention weights.
    Source: TOVA (Oren et al. 2024), arXiv 2401.06104, section 3.2.
    """

    def observe(stats, view, observation):
        asked = (observation.num_tokens > 0)[:, None, None]
        return Stats(per_slot=jnp.where(asked, observation.last_attn, stats.per_slot))

    policy = Policy(
        init=lambda *shape: Stats(per_slot=zeros_per_slot(*shape)),
        observe=observe,
        score=lambda stats, view: stats.per_slot,
        required_stats=frozenset({"last_attn"}),
        name="tova",
    )
    return shared_heads(policy)._replace(name="tova") if shared else policy


@memoized
def snapkv(
    window: int = 32, kernel: int = 7, pool: str = "max", group: str = "pool_first"
) -> Policy:
    """Keeps what the last `window` queries look at, and those around it.

        weight = mean over the last `window` queries of their attention weights
        score  = +inf for the newest `window` pairs
                 weight pooled over `kernel` neighbours, averaged over G, for the others

    The end of a prompt, usually the question, says what of the prompt will be needed;
    pooling keeps the words around a match with it. The weights are computed again from
    the last queries when something has to go, so that any block size gives the same,
    and attention itself hands over nothing: the price is `window` queries remembered
    per row and, per eviction, `window` rows of scores.

    Args:
      window: queries that are asked, and pairs that always stay; the paper's 32.
      kernel: pairs that are pooled, odd; the paper's 7.
      pool: 'max', as the paper has it, or 'average', the released code's default.
      group: 'pool_first' pools each query head's weights and averages over G then, as
        the released code does; 'mean_first' the other way round. Max pooling tells them
        apart, average pooling does not.

    Needs: queries, of which the last are remembered.
    Source: SnapKV (Li et al. 2024), arXiv 2404.14469; released code for pooling before
      the mean, and for zeros beyond the ends.
    Raises:
      UserError: a window below 1, an even kernel, an unknown pooling or order.
    """
    check_counts("snapkv", 1, window=window)
    check_pooling("snapkv", kernel, pool)
    check_choice("snapkv", ("pool_first", "mean_first"), group=group)

    def score(ring, view):
        recent = recent_mask(view, window)
        weight = jnp.mean(asked(ring, view), axis=3)  # [B, K, G, C]
        if group == "mean_first":
            weight = jnp.mean(weight, axis=2, keepdims=True)
        among = (view.positions >= 0) & ~recent
        weight = jnp.mean(pooled(weight, view.positions, among, kernel, pool), axis=2)
        return jnp.where(recent, jnp.inf, weight)

    return asking("snapkv", window, score, num_pinned=window)


@memoized
def chunk_kv(size: int = 10, window: int = 32) -> Policy:
    """Keeps whole chunks of the text, those that the last queries look at most.

        score = mean over the chunk's pairs of the weights of the last `window` queries,
                averaged over all heads; +inf for chunks with one of the newest `window`

    `chunked(shared_heads(snapkv(window, kernel=1)))`: chunks take the place of pooling,
    and all heads make one choice.

    Args:
      size: tokens in a chunk; the paper's 10.
      window: queries that are asked, and pairs that always stay.

    Needs: queries, of which the last are remembered.
    Source: ChunkKV (Liu et al. 2025), arXiv 2502.00299.
    Raises:
      UserError: a size or a window below 1.
    """
    inner = shared_heads(snapkv(window, kernel=1, pool="average"))
    policy = chunked(inner, size)
    return policy._replace(name="chunk_kv", num_pinned=window + size - 1)


class Queries(NamedTuple):
    """The last W queries of every row, in a ring.

    Attributes:
      q: the queries, as attention sees them.
      after: position of each query plus 1; 0 where there is none yet.
    """

    q: Float[Array, "B W K G D"]
    after: Int[Array, "B W"]


def asking(
    name: str, window: int, score: Callable[[Queries, View], Array], num_pinned: int
) -> Policy:
    """A policy over the last `window` queries of every row."""

    def init(spec, batch, capacity):
        heads = spec.num_kv_heads, spec.queries_per_kv_head, spec.head_dim
        queries = jnp.zeros((batch, window, *heads), jnp.float32)
        return Stats(per_row=Queries(queries, jnp.zeros((batch, window), jnp.int32)))

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


def _remember(ring: Queries, observation: Observation) -> Queries:
    """Writes the newest real queries over the oldest ones."""
    batch, window = ring.after.shape
    place = observation.positions % window
    place = jnp.where(real_mask(observation, window), place, window)  # beyond: dropped
    rows = jnp.arange(batch)[:, None]
    queries = rearrange(observation.queries, "b k g t d -> b t k g d")
    return Queries(
        ring.q.at[rows, place].set(queries.astype(jnp.float32), mode="drop"),
        ring.after.at[rows, place].set(observation.positions + 1, mode="drop"),
    )


def asked(ring: Queries, view: View) -> Float[Array, "B K G W C"]:
    """Attention weights of the remembered queries over the live pairs.

    As the layer has them (`View.scoring`). A query does not see pairs newer than itself
    or beyond the layer's window; a place without a query has no weight.
    """
    logits = products(ring, view)
    seen_from = jnp.where(view.positions < 0, jnp.iinfo(jnp.int32).max, view.positions)
    visible = seen_from[:, :, None, None] < ring.after[:, None, None, :, None]
    if view.scoring.local_window:
        visible = visible & in_window(ring, view)[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible, logits, -1e30), axis=-1)
    return jnp.where(visible, weights, 0.0)


def in_window(ring: Queries, view: View) -> Bool[Array, "B K W C"]:
    """Which slots' pairs are in each remembered query's window, in a layer with one."""
    since = ring.after - view.scoring.local_window
    return view.positions[:, :, None] >= since[:, None, :, None]


def products(ring: Queries, view: View) -> Float[Array, "B K G W C"]:
    """Scaled products of the remembered queries and all slots' keys, capped if any."""
    keys = view.keys().astype(jnp.float32)
    scale = keys.shape[-1] ** -0.5
    found = scale * jnp.einsum("bwkgd,bkcd->bkgwc", ring.q, keys, precision="highest")
    cap = view.scoring.logits_soft_cap
    return cap * jnp.tanh(found / cap) if cap else found
