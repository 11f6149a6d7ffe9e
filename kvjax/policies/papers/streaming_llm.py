"""StreamingLLM (Xiao et al. 2024), arXiv 2309.17453."""

from kvjax.policies.base import Policy, check_counts, memoized
from kvjax.policies.baselines import recency
from kvjax.policies.combinators import protect


@memoized
def streaming(sinks: int = 4) -> Policy:
    """Keeps attention sinks and the newest pairs.

        score = +inf for positions below `sinks`, else the position

    The first tokens receive attention whatever they say; without them the model falls
    apart, with them and a window it writes on forever.

    Args:
      sinks: how many of the first tokens stay; the paper's 4.

    Source: StreamingLLM (Xiao et al. 2024), arXiv 2309.17453, section 3.2. The paper
      renumbers positions inside the cache: `rope_positions="cache"` does so. By default
      pairs keep the positions they were made with.
    Raises:
      UserError: a negative number of sinks.
    """
    check_counts("streaming", 0, sinks=sinks)
    return protect(recency(), sinks=sinks, recent=0)._replace(name="streaming")
