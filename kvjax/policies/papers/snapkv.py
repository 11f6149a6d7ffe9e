"""SnapKV (Li et al. 2024), arXiv 2404.14469."""

import jax.numpy as jnp

from kvjax.policies.base import (
    Policy,
    check_choice,
    check_counts,
    memoized,
    recent_mask,
)
from kvjax.policies.combinators import check_pooling
from kvjax.policies.ordering import pooled
from kvjax.policies.recent_queries import attention_weights, recent_query_policy


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
        weight = jnp.mean(attention_weights(ring, view), axis=3)  # [B, K, G, C]
        if group == "mean_first":
            weight = jnp.mean(weight, axis=2, keepdims=True)
        among = (view.positions >= 0) & ~recent
        weight = jnp.mean(pooled(weight, view.positions, among, kernel, pool), axis=2)
        return jnp.where(recent, jnp.inf, weight)

    return recent_query_policy("snapkv", window, score, num_pinned=window)
