"""ChunkKV (Liu et al. 2025), arXiv 2502.00299."""

from kvjax.policies.base import Policy, memoized
from kvjax.policies.combinators import chunked, shared_heads
from kvjax.policies.papers.snapkv import snapkv


@memoized
def chunk_kv(size: int = 10, window: int = 32) -> Policy:
    """Keeps the chunks of text that the last queries attend to most.

        score = mean over the chunk's pairs of the weights of the last `window` queries,
                averaged over all heads; +inf for chunks with one of the newest `window`

    The same as `chunked(shared_heads(snapkv(window, kernel=1)))`: chunks replace
    SnapKV's pooling, and all heads keep the same tokens.

    Args:
      size: tokens per chunk; the paper's 10.
      window: number of last queries, and of newest pairs that are never evicted.

    Needs: queries, the last `window` of which are stored.
    Source: ChunkKV (Liu et al. 2025), arXiv 2502.00299.
    Raises:
      UserError: a size or a window below 1.
    """
    inner = shared_heads(snapkv(window, kernel=1, pool="average"))
    policy = chunked(inner, size)
    return policy._replace(name="chunk_kv", num_pinned=window + size - 1)
