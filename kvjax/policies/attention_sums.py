"""Rules that add up the attention every pair receives."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.base import (
    Policy,
    check_counts,
    check_range,
    memoized,
    recent_mask,
    select_evictions,
    zeros_per_slot,
)
from kvjax.types import Stats, UserError, View


def _summed(
    name: str, score: Callable[[Array, View], Array], num_pinned: int = 0
) -> Policy:
    """A policy over `attn_sum`, the weights each slot has received so far."""
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


@memoized
def average_attention() -> Policy:
    """Keeps the pairs with the highest average attention weight.

        score = (sum of the weights received) / age

    A sum favours old pairs, which more queries have seen; the average does not. The age
    of a pair is the tokens since it came, itself included, in the row's own positions.
    The paper's curr_id is the newest token that was read: while decoding, room is made
    for a token before it asks anything, so that one does not count, and the age is the
    number of queries that have seen the pair.
    Grouped queries: mean over the G query heads.

    Needs: attn_sum, the column sums of the attention weights.
    Source: Batch-Max (Metel et al. 2024), arXiv 2412.05693, section 3.2.
    """

    def score(attn_sum: Float[Array, "B K C"], view: View) -> Array:
        return attn_sum / seen_by(view)

    return _summed("average_attention", score)


@memoized
def h2o(recent: float = 0.5, sinks: int = 0) -> Policy:
    """Keeps heavy hitters and a window: the largest summed weights, the newest pairs.

        score = +inf for the first `sinks` tokens and the newest
                floor(recent * (num_keep - sinks)) pairs, or `recent` if it is a count;
                sum of the weights received for the others

    `num_keep` is what the choice leaves, so half of every kept set is recent.

    Args:
      recent: share of the kept pairs reserved for the newest, 0 to 1; the paper's 0.5.
        A whole number of 2 or more is a count of pairs: 128 keeps the newest 128 at any
        budget, which has to leave room for more. 1 is the share, however it is written.
      sinks: first tokens that stay.

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

    return _summed("h2o", score, num_pinned=sinks + (recent if counted else 0))


@memoized
def h2o_sinks(recent: float = 0.5, sinks: int = 4) -> Policy:
    """Keeps attention sinks, heavy hitters and a window.

        score = as `h2o`, with the first `sinks` tokens at +inf

    Summed weights keep the sinks by themselves while their sums last; pinned, they stay
    at any budget, and the shares of the others are counted without them.

    Args:
      recent: share of the other kept pairs reserved for the newest, or a count of
        pairs, as in `h2o`.
      sinks: first tokens that stay; StreamingLLM's 4.

    Needs: attn_sum, the column sums of the attention weights.
    Source: H2O (Zhang et al. 2023), arXiv 2306.14048, with the sinks of StreamingLLM
      (Xiao et al. 2024), arXiv 2309.17453.
    Raises:
      UserError: as `h2o`.
    """
    return h2o(recent, sinks)._replace(name="h2o_sinks")


@memoized
def roco(spread: float = 0.3, recent: int = 10, sinks: int = 0) -> Policy:
    """Keeps the pairs whose weights vary most, and of the others the highest means.

        mean      = (sum of weights) / age
        deviation = sqrt((sum of squared weights) / age - mean ** 2)
        score     = mean, for the num_keep - floor(spread * num_keep) - sinks lowest
                    deviations (at least as many as have to go), +inf for the others

    A pair that some queries look at hard and most ignore has a low mean but a high
    deviation: it waits for its query. Sinks and the newest pairs, whose deviations mean
    little yet, count as highest. That pins none of them: where few pairs have to go and
    so many deviations are highest, the older of these compete by their means too.

    Args:
      spread: share of the kept pairs that the highest deviations protect; 0.3 in the
        authors' decoding mode, 0.1 in their encoding mode.
      recent: newest pairs whose deviations count as highest; the authors' 10.
      sinks: first tokens that do too; the authors' 0 in decoding, 4 in encoding.

    Needs: attn_sum and attn_sq_sum, column sums of the weights and of their squares.
    Source: RoCo (Ren & Zhu 2024), arXiv 2402.06262, and its code, EasyKV, which
      averages weights over the G query heads before it squares them, as is done here.
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
        total, squares = (sums / seen_by(view) for sums in stats.per_slot)
        deviation = jnp.sqrt(jnp.maximum(squares - total * total, 0.0))
        pinned = recent_mask(view, recent) | (view.positions < sinks)
        deviation = jnp.where(pinned, jnp.inf, deviation)
        held = jnp.sum(view.positions >= 0, axis=-1, dtype=jnp.int32)
        protected = jnp.floor(spread * view.num_keep.astype(jnp.float32))
        count = view.num_keep - protected.astype(jnp.int32) - sinks
        count = jnp.maximum(count, held - view.num_keep)  # as many as have to go
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


def _is_count(where: str, recent: float) -> bool:
    """Whether a window is a count of pairs, rather than a share of those kept."""
    whole = isinstance(recent, int) and not isinstance(recent, bool)
    if whole and recent > 1:
        return True
    if not (whole or isinstance(recent, float)) or not 0 <= recent <= 1:
        raise UserError(
            f"{where}(recent={recent!r}): a share from 0 to 1, or a whole number of "
            "pairs, 2 or more"
        )
    return False


def seen_by(view: View) -> Float[Array, "B K C"]:
    """Queries that have seen each pair: as many as its age in tokens, and itself."""
    return (view.query_position[:, None, None] + 1 - view.positions).astype(jnp.float32)
