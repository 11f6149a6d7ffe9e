"""ChunkKV (Liu et al. 2025), arXiv 2502.00299."""

from kvjax.policies.base import Policy, memoized
from kvjax.policies.combinators import chunked, shared_heads
from kvjax.policies.papers.snapkv import snapkv


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
