"""TOVA (Oren et al. 2024), arXiv 2401.06104."""

import jax.numpy as jnp

from kvjax.policies.base import Policy, memoized, zeros_per_slot
from kvjax.policies.combinators import shared_heads
from kvjax.types import Stats


@memoized
def tova(shared: bool = True) -> Policy:
    """Keeps the pairs that the last query attends to most.

        score = weights of the last query, averaged over the G query heads
                (shared: and over the K KV heads)

    The newest pair competes like any other; `protect(tova(), 0, 1)` pins it.

    Args:
      shared: True evicts the same tokens in all KV heads of a layer, as in the paper;
        False ranks pairs per KV head, as in the paper's ablation.

    Needs: last_attn, one row of the attention weights.
    Source: TOVA (Oren et al. 2024), arXiv 2401.06104, section 3.2.
    """

    def observe(stats, view, observation):
        has_query = (observation.num_tokens > 0)[:, None, None]
        return Stats(
            per_slot=jnp.where(has_query, observation.last_attn, stats.per_slot)
        )

    policy = Policy(
        init=lambda *shape: Stats(per_slot=zeros_per_slot(*shape)),
        observe=observe,
        score=lambda stats, view: stats.per_slot,
        required_stats=frozenset({"last_attn"}),
        name="tova",
    )
    return shared_heads(policy)._replace(name="tova") if shared else policy
