"""SimLayerKV (Zhang et al. 2024), arXiv 2410.13846."""

import jax.numpy as jnp

from kvjax.policies.base import Policy, check_counts, check_range, memoized, recent_mask
from kvjax.policies.recent_queries import attention_weights, recent_query_policy


@memoized
def simlayerkv(
    threshold: float = 0.9, sinks: int = 4, recent: int = 1024, queries: int = 32
) -> Policy:
    """Keeps sinks and a window in lazy layers, and the newest pairs in the others.

        laziness = weight of the last `queries` queries on the first `sinks` tokens and
                   on the `recent` tokens up to their own; mean over queries and heads
        lazy     = laziness > threshold, for each row and layer
        score    = +inf for the sinks, position for the others;
                   -inf beyond sinks and window if lazy

    Lazy layers attend only to the first and the nearest tokens, and need no others. A
    layer that is not lazy keeps the newest pairs up to its budget. Lazy layers leave
    slots empty: fewer bytes are live, but as many are allocated.

    Args:
      threshold: from 0 to 1; the authors' 0.9 for Llama-3, 0.65 for Llama-2, 0.8 for
        Mistral, 0.85 for Qwen2.
      sinks: number of first tokens; the paper's 4.
      recent: tokens in the window; the paper's 1,024.
      queries: number of last queries; the paper's 32. With 1 it is what the released
        code does at the first decode step.

    Needs: queries, the last of which are stored.
    Source: SimLayerKV (Zhang et al. 2024), arXiv 2410.13846. The released code counts
      pairs twice that are both sinks and recent; here they count once.
    Raises:
      UserError: a threshold outside 0 .. 1, numbers that are too small.
    """
    check_range("simlayerkv", 0, 1, threshold=threshold)
    check_counts("simlayerkv", 0, sinks=sinks)
    check_counts("simlayerkv", 1, recent=recent, queries=queries)

    def score(ring, view):
        near = recent_mask(view, recent) | (view.positions < sinks)
        kept = near | ~_lazy(ring, view)[:, None, None]
        position = jnp.where(kept, view.positions.astype(jnp.float32), -jnp.inf)
        return jnp.where(view.positions < sinks, jnp.inf, position)

    def _lazy(ring, view):
        weights = attention_weights(ring, view)  # [B, K, G, W, C]
        since = (ring.after - recent)[:, None, :, None]  # [B, 1, W, 1]
        pos = view.positions[:, :, None]
        near = (pos >= since) | (pos < sinks)
        total = jnp.einsum("bkgwc,bkwc->bk", weights, near.astype(jnp.float32))
        total = view.gather_heads(total)  # [B, H]
        heads = total.shape[1] * weights.shape[2]
        count = jnp.maximum(jnp.sum(ring.after > 0, axis=1), 1) * heads
        return jnp.sum(total, axis=1) / count.astype(jnp.float32) > threshold

    policy = recent_query_policy("simlayerkv", queries, score, num_pinned=sinks)
    return policy._replace(needs_all_heads=True)
