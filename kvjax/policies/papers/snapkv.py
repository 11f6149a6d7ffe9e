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
    """Keeps the pairs that the last queries attend to most, and their neighbours.

        weight = mean over the last `window` queries of their attention weights
        score  = +inf for the newest `window` pairs
                 weight pooled over `kernel` neighbours, averaged over G, for the others

    The end of a prompt, usually the question, shows which of its tokens will be needed;
    pooling keeps the neighbours of a token with it. The policy stores the last `window`
    queries of every row and computes their attention weights at each eviction. So the
    result does not depend on the block size, attention returns no statistics, and an
    eviction costs `window` rows of attention scores.

    Args:
      window: number of last queries, and of newest pairs that are never evicted; the
        paper's 32.
      kernel: number of neighbouring pairs that are pooled, odd; the paper's 7.
      pool: 'max', as in the paper, or 'average', the released code's default.
      group: 'pool_first' pools the weights of each query head, then averages over G, as
        the released code does; 'mean_first' averages first. They differ under max
        pooling only.

    Needs: queries, the last `window` of which are stored.
    Source: SnapKV (Li et al. 2024), arXiv 2404.14469; pooling before the mean, and
      zeros beyond the ends, as in the released code.
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
