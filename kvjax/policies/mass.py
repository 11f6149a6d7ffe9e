"""Rules that add up the attention every pair receives."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.base import Policy, once
from kvjax.types import UserError, View


def _summed(name, score) -> Policy:
    """A policy over `mass`, the weights each slot has received so far."""
    return Policy(
        init=lambda spec, batch, capacity: jnp.zeros(
            (batch, spec.num_kv_heads, capacity), jnp.float32
        ),
        observe=lambda mass, view, observation: mass + observation.mass,
        score=score,
        needs=frozenset({"mass"}),
        name=name,
    )


@once
def average_attention() -> Policy:
    """Keeps the pairs with the highest average attention weight.

        score = (sum of the weights received) / (now + 1 - position)

    A sum favours old pairs, which more queries have seen; the average does not. Ages
    count in the row's own positions. Grouped queries: mean over the G query heads.

    Needs: mass.
    Source: Batch-Max (Metel et al. 2024), section 3.2.
    """

    def score(mass: Float[Array, "B K C"], view: View) -> Array:
        seen_by = (view.now[:, None, None] + 1 - view.pos).astype(jnp.float32)
        return mass / seen_by

    return _summed("average_attention", score)


@once
def h2o(recent: float = 0.5) -> Policy:
    """Heavy hitters and a window: the largest summed weights, and the newest pairs.

        score = +inf                          for the newest `recent` * keep pairs
                sum of the weights received   for the others

    `keep` is what the choice leaves, so half of every kept set is recent.

    Args:
      recent: share of the kept pairs reserved for the newest; the paper's 0.5.

    Needs: mass.
    Source: H2O (Zhang et al. 2023), section 4, Algorithm 1; a mean over the G query
      heads of a KV head extends it to grouped queries.
    Raises:
      UserError: a share outside 0 .. 1.
    """
    if not 0.0 <= recent <= 1.0:
        raise UserError(f"h2o(recent={recent}): a share between 0 and 1")

    def score(mass: Float[Array, "B K C"], view: View) -> Array:
        window = jnp.floor(recent * view.keep.astype(jnp.float32)).astype(jnp.int32)
        newest = view.pos > (view.now - window)[:, None, None]
        return jnp.where(newest, jnp.inf, mass)

    return _summed("h2o", score)
