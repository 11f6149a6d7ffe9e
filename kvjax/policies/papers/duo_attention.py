"""DuoAttention (Xiao et al. 2024), arXiv 2410.10819: heads of two kinds."""

from kvjax.policies.base import Policy, memoized
from kvjax.policies.combinators import by_size
from kvjax.policies.papers.batch_max import average_attention
from kvjax.policies.papers.key_diff import key_diff


@memoized
def retrieval_heads(above: float = 1.2) -> Policy:
    """Keeps what KeyDiff ranks highest in large heads, average attention in the others.

        score = KeyDiff's in heads with |kv| > above * mean over all heads,
                else average attention's

    A few heads retrieve what was said long ago: they need pairs that differ from each
    other, whether recent queries attend to them or not. The other heads continue the
    text and need the pairs that they attend to. The policy tells both kinds apart by
    their sizes, so it needs a budget that is calibrated per head: `budget="25%"`, or
    the budget rule `calibrated`. Under a uniform budget it is KeyDiff. With a share
    such as "25%", the sizes are interpolated 25% towards uniform ones (`Policy.even`),
    so that small heads can still hold what a text repeats.

    Args:
      above: heads with more than this many times the mean size are large.

    Needs: attn_sum, for average attention.
    Source: DuoAttention (Xiao et al. 2024), arXiv 2410.10819, for heads of two kinds;
      its retrieval heads keep all pairs and are found by training, its others stream.
    Raises:
      UserError: a negative number.
    """
    policy = by_size(key_diff(), average_attention(), above)
    return policy._replace(name="retrieval_heads", even=0.25)
