"""RoCo (Ren & Zhu 2024), arXiv 2402.06262."""

import jax.numpy as jnp

from kvjax.policies.attention_sums import num_queries
from kvjax.policies.base import (
    Policy,
    check_counts,
    check_range,
    memoized,
    recent_mask,
    select_evictions,
    zeros_per_slot,
)
from kvjax.types import Stats


@memoized
def roco(spread: float = 0.3, recent: int = 10, sinks: int = 0) -> Policy:
    """Keeps the pairs whose weights vary most, then those with the highest means.

        mean      = (sum of weights) / age
        deviation = sqrt((sum of squared weights) / age - mean ** 2)
        score     = mean, for the num_keep - floor(spread * num_keep) - sinks lowest
                    deviations (at least as many as must be evicted), +inf for the rest

    A pair that few queries attend to strongly and most ignore has a low mean but a high
    deviation, so it is kept for the next such query. Deviations of sinks and of the
    newest pairs, which few queries have seen, count as infinite. That pins none of
    them: when more pairs have infinite deviation than are protected, the older of these
    compete by their means too.

    Args:
      spread: share of the kept pairs that are protected for their deviations; 0.3 in
        the authors' decoding mode, 0.1 in their encoding mode.
      recent: number of newest pairs whose deviation counts as infinite; the authors'
        10.
      sinks: number of first tokens whose deviation does too; the authors' 0 in
        decoding, 4 in encoding.

    Needs: attn_sum and attn_sq_sum, column sums of the weights and of their squares.
    Source: RoCo (Ren & Zhu 2024), arXiv 2402.06262, and its code, EasyKV, which
      averages weights over the G query heads before it squares them, as here.
    Raises:
      UserError: a share outside 0 .. 1, a negative number of pairs.
    """
    check_range("roco", 0, 1, spread=spread)
    check_counts("roco", 0, recent=recent, sinks=sinks)

    def observe(stats, view, observation):
        total, squares = stats.per_slot
        squares = squares + observation.attn_sq_sum
        return Stats(per_slot=(total + observation.attn_sum, squares))

    def score(stats, view):
        total, squares = (sums / num_queries(view) for sums in stats.per_slot)
        deviation = jnp.sqrt(jnp.maximum(squares - total * total, 0.0))
        pinned = recent_mask(view, recent) | (view.positions < sinks)
        deviation = jnp.where(pinned, jnp.inf, deviation)
        held = jnp.sum(view.positions >= 0, axis=-1, dtype=jnp.int32)
        protected = jnp.floor(spread * view.num_keep.astype(jnp.float32))
        count = view.num_keep - protected.astype(jnp.int32) - sinks
        count = jnp.maximum(count, held - view.num_keep)  # evict enough
        steady = select_evictions(deviation, view.positions, count)
        return jnp.where(steady | jnp.isnan(total), total, jnp.inf)

    return Policy(
        init=lambda *shape: Stats(
            per_slot=(zeros_per_slot(*shape), zeros_per_slot(*shape))
        ),
        observe=observe,
        score=score,
        required_stats=frozenset({"attn_sum", "attn_sq_sum"}),
        name="roco",
    )
