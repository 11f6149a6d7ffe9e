"""H2O (Zhang et al. 2023), arXiv 2306.14048."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.attention_sums import attention_sum_policy
from kvjax.policies.base import Policy, check_counts, memoized, recent_mask
from kvjax.types import UserError, View


@memoized
def h2o(recent: float = 0.5, sinks: int = 0) -> Policy:
    """Keeps heavy hitters (the largest summed weights) and the newest pairs.

        score = +inf for the first `sinks` tokens and the newest
                floor(recent * (num_keep - sinks)) pairs, or `recent` if it is a count;
                sum of the weights received for the others

    `num_keep` counts the pairs that remain after the eviction, so by default half of
    every kept set is recent.

    Args:
      recent: share of the kept pairs reserved for the newest, 0 to 1; the paper's 0.5.
        An integer of 2 or more is a number of pairs: 128 keeps the newest 128 at any
        budget, which must be larger. 1 is always a share.
      sinks: number of first tokens that are never evicted.

    Needs: attn_sum, the column sums of the attention weights.
    Source: H2O (Zhang et al. 2023), arXiv 2306.14048, Algorithm 1; a mean over the G
      query heads of a KV head extends it to grouped queries.
    Raises:
      UserError: neither a share of 0 .. 1 nor a count, a negative number of sinks.
    """
    check_counts("h2o", 0, sinks=sinks)
    counted = _is_count("h2o", recent)

    def window(view: View) -> int | Array:
        if counted:
            return recent
        share = jnp.floor(recent * (view.num_keep - sinks).astype(jnp.float32))
        return share.astype(jnp.int32)

    def score(attn_sum: Float[Array, "B K C"], view: View) -> Array:
        pinned = recent_mask(view, window(view)) | (view.positions < sinks)
        return jnp.where(pinned, jnp.inf, attn_sum)

    return attention_sum_policy(
        "h2o", score, num_pinned=sinks + (recent if counted else 0)
    )


@memoized
def h2o_sinks(recent: float = 0.5, sinks: int = 4) -> Policy:
    """Keeps attention sinks, heavy hitters and the newest pairs.

        score = as `h2o`, with the first `sinks` tokens at +inf

    Summed weights alone usually keep the sinks. Pinning keeps them at any budget, and
    the share of recent pairs is taken of the other pairs.

    Args:
      recent: share of the other kept pairs reserved for the newest, or a number of
        pairs, as in `h2o`.
      sinks: number of first tokens that are never evicted; StreamingLLM's 4.

    Needs: attn_sum, the column sums of the attention weights.
    Source: H2O (Zhang et al. 2023), arXiv 2306.14048, with the sinks of StreamingLLM
      (Xiao et al. 2024), arXiv 2309.17453.
    Raises:
      UserError: as `h2o`.
    """
    return h2o(recent, sinks)._replace(name="h2o_sinks")


def _is_count(where: str, recent: float) -> bool:
    """Returns whether `recent` is a number of pairs, rather than a share."""
    whole = isinstance(recent, int) and not isinstance(recent, bool)
    if whole and recent > 1:
        return True
    if not (whole or isinstance(recent, float)) or not 0 <= recent <= 1:
        raise UserError(
            f"{where}(recent={recent!r}): a share from 0 to 1, or a whole number of "
            "pairs, 2 or more"
        )
    return False
