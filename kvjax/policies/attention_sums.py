"""Attention weights summed per pair: what Batch-Max, H2O, RoCo and FastGen share."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.base import Policy, zeros_per_slot
from kvjax.types import Stats, View


def attention_sum_policy(
    name: str, score: Callable[[Array, View], Array], num_pinned: int = 0
) -> Policy:
    """Returns a policy over `attn_sum`, the weights that each pair has received.

    Args:
      name: of the policy.
      score: (sums f32[B, K, C], view) -> scores f32[B, K, C].
      num_pinned: see `Policy`.
    """
    return Policy(
        init=lambda *shape: Stats(per_slot=zeros_per_slot(*shape)),
        observe=lambda stats, view, observation: Stats(
            per_slot=stats.per_slot + observation.attn_sum
        ),
        score=lambda stats, view: score(stats.per_slot, view),
        required_stats=frozenset({"attn_sum"}),
        name=name,
        num_pinned=num_pinned,
    )


def num_queries(view: View) -> Float[Array, "B K C"]:
    """Returns how many queries have seen each pair: its age in tokens plus 1."""
    return (view.query_position[:, None, None] + 1 - view.positions).astype(jnp.float32)
