"""TOVA (Oren et al. 2024), arXiv 2401.06104."""

import jax.numpy as jnp

from kvjax.policies.base import Policy, memoized, zeros_per_slot
from kvjax.policies.combinators import shared_heads
from kvjax.types import Stats


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
