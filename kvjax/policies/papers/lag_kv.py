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
    """Keeps what stands out from the text that follows it.

        x     = (pair - min of the next partition) / (its max - its min), per channel
        score = softmax over the partition of the standard deviation of x over channels,
                the mean of that for keys and for values

    The live pairs after the sinks are cut into partitions of `lag`. A partition is
    judged against the one after it, so the last whole one and what follows it have
    nothing to be judged by: they score 1, and of them the newest stay. Looks at no
    attention weight and no query; sorts keys and values by age once per eviction.

    Args:
      sinks: first tokens that stay; the paper's 16.
      lag: pairs in a partition; the paper's 128.
      ranked: score = rank within the partition / lag, so that every partition keeps
        the same share, as in the paper; else partitions compete by the softmax itself.

    Source: LagKV (Liang et al. 2025), arXiv 2504.04704; deviations with D - 1, as the
      released code has them. On a channel where the next partition is constant that
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
    """Spread over channels on the scale of the next partition; softmax within its own.

    The last partition is judged against the first; its score is not used.
    """
    following = jnp.roll(x, -1, axis=2)
    low = jnp.min(following, axis=3, keepdims=True)
    span = jnp.max(following, axis=3, keepdims=True) - low
    scaled = (x - low) / jnp.where(span > 0, span, 1.0)
    return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=1), axis=-1)
