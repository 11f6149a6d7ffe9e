"""StreamingLLM (Xiao et al. 2024), arXiv 2309.17453."""

from kvjax.policies.base import Policy, check_counts, memoized
from kvjax.policies.baselines import recency
from kvjax.policies.combinators import protect


@memoized
def streaming(sinks: int = 4) -> Policy:
    """Keeps attention sinks and the newest pairs.

        score = +inf for positions below `sinks`, else the position

    The first tokens receive much attention whatever they are. A model without them
    fails; with them and a window it generates text of any length.

    Args:
      sinks: number of first tokens that are never evicted; the paper's 4.

    Source: StreamingLLM (Xiao et al. 2024), arXiv 2309.17453, section 3.2. The paper
      renumbers positions inside the cache: `rope_positions="cache"` does so. By default
      pairs keep their original positions.
    Raises:
      UserError: a negative number of sinks.
    """
    check_counts("streaming", 0, sinks=sinks)
    return protect(recency(), sinks=sinks, recent=0)._replace(name="streaming")
