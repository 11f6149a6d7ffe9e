"""LagKV (Liang et al. 2025), arXiv 2504.04704."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from kvjax.policies.base import Policy, check_counts, memoized, stateless
from kvjax.policies.ordering import sort_by_position, take
from kvjax.types import View


@memoized
def lag_kv(sinks: int = 16, lag: int = 128, ranked: bool = True) -> Policy:
    """Keeps the pairs that differ most from the pairs that follow them.

        x     = (pair - min of the next partition) / (its max - its min), per channel
        score = softmax over the partition of the standard deviation of x over channels,
                the mean of that for keys and for values

    The live pairs after the sinks are divided into partitions of `lag` pairs. A
    partition is scaled by the next one. The last full partition and the pairs after it
    have no next one: they score 1, and the newest of them are kept. The policy uses no
    attention weights and no queries; an eviction sorts keys and values by position.

    Args:
      sinks: number of first tokens that are never evicted; the paper's 16.
      lag: pairs per partition; the paper's 128.
      ranked: True replaces the softmax by the rank within the partition / lag, as in
        the paper, so that every partition keeps the same share; False lets partitions
        compete by the softmax.

    Source: LagKV (Liang et al. 2025), arXiv 2504.04704; deviations with D - 1, as the
      released code has them. On a channel where the next partition is constant, that
      code divides by zero; here the range counts as 1.
    Raises:
      UserError: a negative number of sinks, a lag below 2.
    """
    check_counts("lag_kv", 0, sinks=sinks)
    check_counts("lag_kv", 2, lag=lag)

    def score(view: View) -> Array:
        order = sort_by_position(view.positions, view.positions >= 0)
        count = -(-max(view.positions.shape[2] - sinks, 1) // lag)  # partitions at most

        def partitions(x: Array) -> Float[Array, "B K P S D"]:
            x = jnp.take_along_axis(x, order.slots[..., None], axis=2)[:, :, sinks:]
            short = count * lag - x.shape[2]
            x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (0, short), (0, 0)))
            return rearrange(x, "b k (p s) d -> b k p s d", p=count)

        both = [_stands_out(partitions(x())) for x in (view.keys, view.values)]
        part = (both[0] + both[1]) / 2
        if ranked:
            rank = jnp.argsort(jnp.argsort(part, axis=-1), axis=-1)
            part = rank.astype(jnp.float32) / lag
        held = jnp.sum(view.positions >= 0, axis=-1)[..., None]
        next_ends = sinks + lag * (jnp.arange(count)[None, None] + 2)
        part = jnp.where((next_ends <= held)[..., None], part, 1.0)
        part = rearrange(part, "b k p s -> b k (p s)")
        first = jnp.full((*part.shape[:2], sinks), jnp.inf)
        whole = jnp.concatenate([first, part], axis=-1)[..., : view.positions.shape[2]]
        return take(whole, order.ranks)

    return stateless("lag_kv", score, num_pinned=sinks)


def _stands_out(x: Float[Array, "B K P S D"]) -> Float[Array, "B K P S"]:
    """Returns the softmax, within a partition, of each pair's spread over channels.

    The next partition's range scales the channels. The last partition is scaled by the
    first one; the caller does not use its score.
    """
    following = jnp.roll(x, -1, axis=2)
    low = jnp.min(following, axis=3, keepdims=True)
    span = jnp.max(following, axis=3, keepdims=True) - low
    scaled = (x - low) / jnp.where(span > 0, span, 1.0)
    return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=1), axis=-1)
