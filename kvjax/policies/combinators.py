"""Combinators: functions that make a policy from other policies.

They nest::

    protect(smooth(tova(), kernel=5), sinks=4, recent=32)

An argument that is no policy, such as a name, is a UserError. The result carries the
weights of learned policies, see `kvjax.policies.base.memoized`.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.base import (
    Policy,
    check_choice,
    check_counts,
    check_range,
    memoized,
    own_heads,
    recent_mask,
    select_evictions,
    validate,
)
from kvjax.policies.ordering import pooled, segments
from kvjax.types import EMPTY, Stats, UserError, View, real_number


@memoized
def protect(policy: Policy, sinks: int = 4, recent: int = 32) -> Policy:
    """Pins the first `sinks` and the newest `recent` tokens of every row.

        score = +inf for positions < sinks and the newest `recent`, else the policy's

    Most policies since H2O pin a window of recent pairs.

    Args:
      policy: ranks the other pairs.
      sinks: positions 0 .. sinks - 1 are pinned.
      recent: the last `recent` tokens are pinned.

    Source: StreamingLLM (Xiao et al. 2024), arXiv 2309.17453, for attention sinks.
    Raises:
      UserError: a negative number. `kvjax.cache.make_spec` checks that the pinned pairs
        fit the budget.
    """
    validate(policy)
    check_counts("protect", 0, sinks=sinks, recent=recent)

    def score(stats, view):
        pinned = (view.positions < sinks) | recent_mask(view, recent)
        return jnp.where(pinned, jnp.inf, policy.score(stats, view))

    return policy._replace(
        score=score,
        name=f"protect({policy.name}, sinks={sinks}, recent={recent})",
        num_pinned=policy.num_pinned + sinks + recent,
    )


@memoized
def mix(a: Policy, b: Policy, weight: float = 0.5) -> Policy:
    """Ranks pairs by the weighted mean of two policies' scores.

        score = weight * a's + (1 - weight) * b's, each scaled to 0 .. 1

    Scores of different policies have different units, so each is first scaled to the
    range over the live pairs of its head. A pair that either policy pins is pinned; one
    that either scores -inf is evicted, unless the other pins it.

    Args:
      a: one policy.
      b: the other.
      weight: of `a`, from 0 to 1.

    Raises:
      UserError: a weight outside 0 .. 1.
    """
    validate(a)
    validate(b)
    check_range("mix", 0, 1, weight=weight)

    def score(stats, view):
        first = a.score(_member_stats(stats, 0), _member_view(view, 0))
        second = b.score(_member_stats(stats, 1), _member_view(view, 1))
        mixed = weight * _to_unit(first, view) + (1 - weight) * _to_unit(second, view)
        mixed = jnp.where(jnp.isneginf(first) | jnp.isneginf(second), -jnp.inf, mixed)
        mixed = jnp.where(jnp.isposinf(first) | jnp.isposinf(second), jnp.inf, mixed)
        return jnp.where(jnp.isnan(first) | jnp.isnan(second), jnp.nan, mixed)

    return Policy(
        init=lambda *shape: _join(a.init(*shape), b.init(*shape)),
        observe=lambda stats, view, observation: _join(
            a.observe(_member_stats(stats, 0), _member_view(view, 0), observation),
            b.observe(_member_stats(stats, 1), _member_view(view, 1), observation),
        ),
        score=score,
        required_stats=a.required_stats | b.required_stats,
        name=f"mix({a.name}, {b.name}, {weight})",
        num_pinned=a.num_pinned + b.num_pinned,
        needs_all_heads=a.needs_all_heads or b.needs_all_heads,
    )


@memoized
def smooth(policy: Policy, kernel: int = 7, pool: str = "average") -> Policy:
    """Pools a policy's scores along the text, so that neighbours are kept together.

        score = mean or maximum of the policy's scores over `kernel` neighbours

    Neighbours are the live pairs next to a pair in the order of positions. Pinned pairs
    are not pooled, and stay pinned.

    Args:
      policy: gives the scores.
      kernel: number of pairs that are pooled; odd, the pair itself in the middle.
      pool: 'average' (zeros beyond the ends count) or 'max'.

    Source: SnapKV (Li et al. 2024), arXiv 2404.14469, pools attention weights so.
    Raises:
      UserError: an even kernel or one below 1; an unknown pooling.
    """
    validate(policy)
    check_pooling("smooth", kernel, pool)

    def score(stats, view):
        raw = policy.score(stats, view)
        among = (view.positions >= 0) & jnp.isfinite(raw)
        return jnp.where(among, pooled(raw, view.positions, among, kernel, pool), raw)

    name = f"smooth({policy.name}, kernel={kernel}, pool={pool!r})"
    return policy._replace(score=score, name=name)


@memoized
def chunked(policy: Policy, size: int = 10) -> Policy:
    """Keeps or evicts whole chunks of text, by the mean score of their live pairs.

        score = mean over the live pairs with the same position // size

    Words lose their meaning without their neighbours. An eviction drops an exact number
    of pairs, so it may cut one chunk, whose older pairs are evicted first; it cuts none
    if budget and eviction size are multiples of `size`. A chunk with a pinned pair is
    pinned as a whole.

    Args:
      policy: gives the scores.
      size: tokens per chunk; the paper's 10.

    Source: ChunkKV (Liu et al. 2025), arXiv 2502.00299.
    Raises:
      UserError: a size below 1.
    """
    validate(policy)
    check_counts("chunked", 1, size=size)

    def score(stats, view):
        raw = policy.score(stats, view)
        mean = segments(raw, view.positions, size)
        # The mean of +inf and -inf is NaN: the pinned pair pins its chunk.
        return jnp.where(jnp.isnan(mean) & ~jnp.isnan(raw), jnp.inf, mean)

    return policy._replace(
        score=score,
        name=f"chunked({policy.name}, size={size})",
        # The last sink and the first pair of a window may each pin size - 1 more.
        num_pinned=policy.num_pinned and policy.num_pinned + 2 * (size - 1),
    )


@memoized
def shared_heads(policy: Policy) -> Policy:
    """Keeps the same tokens in all heads of a layer.

        score = mean of the policy's scores over the K heads

    The heads of a row then hold the same positions, as in policies that evict tokens
    rather than pairs. The policy must not score a pair +inf in one head and -inf in
    another.

    Args:
      policy: gives the scores.

    Raises:
      UserError: `policy` is no policy.
    """
    validate(policy)

    def score(stats, view):
        raw = policy.score(stats, view)
        mean = jnp.mean(view.gather_heads(raw), axis=1, keepdims=True)
        return jnp.broadcast_to(mean, raw.shape)

    name = f"shared_heads({policy.name})"
    return policy._replace(score=score, name=name, needs_all_heads=True)


@memoized
def per_head(policy: Policy, total: float = 0.5, floor: float = 0.2) -> Policy:
    """Keeps the best pairs of a layer, whichever head they are in.

        score = the policy's for the kept pairs, -inf for the others

    An eviction leaves the H heads of a layer floor(total * n) * H pairs together, where
    n is `View.num_keep`, the most that one head can hold afterwards. The pairs of all
    heads compete, except that every head keeps its best floor(floor * total * n). The
    budget says how many slots are allocated, `total` how many of them are live.

    Args:
      policy: gives the scores, which must be comparable across heads, as attention
        weights are.
      total: share of the heads' slots that stay live; with 1, heads do not compete.
      floor: share of a head's mean, total * n, that every head keeps.

    Source: Ada-KV (Feng et al. 2024), arXiv 2407.11550, whose safeguard is `floor`.
    Raises:
      UserError: a share outside 0 .. 1, a total of 0.
    """
    validate(policy)
    check_range("per_head", 0, 1, total=total, floor=floor)
    if total == 0:
        raise UserError("per_head(total=0) leaves nothing: give a share above 0")

    def score(stats, view):
        own = policy.score(stats, view)
        kept = select(
            view.gather_heads(own),
            view.gather_heads(view.positions),
            view.gather_heads(view.num_keep),
        )
        return jnp.where(own_heads(view, kept), own, -jnp.inf)

    def select(raw, pos, keep):
        """Returns the kept pairs of all heads, bool[B, H, C]."""
        held = jnp.sum(pos >= 0, axis=-1, dtype=jnp.int32)  # [B, H]
        full = held > keep
        most = jnp.max(keep, axis=1, keepdims=True, where=full, initial=0)  # n
        mean = jnp.floor(total * most.astype(jnp.float32))
        least = jnp.floor(floor * mean).astype(jnp.int32)
        beyond = jnp.maximum(held - most, 0)
        too_many = select_evictions(raw, pos, beyond)  # for the head's own slots
        rivals = jnp.where(too_many, EMPTY, pos)
        best = ~select_evictions(raw, pos, jnp.maximum(held - least, 0))
        surplus = jnp.sum(jnp.minimum(held, most) - mean.astype(jnp.int32), axis=1)
        surplus = jnp.maximum(surplus, 0)
        flat = (len(raw), 1, -1)  # all heads of a row as one
        outranked = select_evictions(
            jnp.where(best, jnp.inf, raw).reshape(flat), rivals.reshape(flat), surplus
        )
        kept = ~(too_many | outranked.reshape(raw.shape))
        return kept | ~jnp.any(full, axis=1)[:, None, None]

    return policy._replace(
        score=score,
        name=f"per_head({policy.name}, total={total}, floor={floor})",
        num_pinned=math.ceil(policy.num_pinned / total),
        needs_all_heads=True,
    )


@memoized
def by_size(large: Policy, small: Policy, above: float = 1.2) -> Policy:
    """Applies one policy to heads with large budgets, and another to the others.

        score = large's in heads with |kv| > above * mean over all heads, else small's

    Under a uniform budget, or an unknown one, `large` scores all heads.

    Args:
      large: policy of heads with large budgets.
      small: policy of the others.
      above: heads with more than this many times the mean budget are large.

    Raises:
      UserError: a negative number.
    """
    real_number("by_size(above)", above, 0)

    def index(view: View) -> int:
        if view.mean_budget is None or view.budget is None:
            return 0
        return 0 if view.budget > above * view.mean_budget else 1

    def score(stats, view):
        chosen = index(view)
        policy = (large, small)[chosen]
        return policy.score(_member_stats(stats, chosen), _member_view(view, chosen))

    return mix(large, small)._replace(
        score=score,
        name=f"by_size({large.name}, {small.name}, {above})",
        num_pinned=max(large.num_pinned, small.num_pinned),
    )


def check_pooling(where: str, kernel: int, pool: str) -> None:
    """Raises UserError unless the kernel is odd and the pooling is known."""
    check_counts(where, 1, kernel=kernel)
    if kernel % 2 == 0:
        raise UserError(f"{where}(kernel={kernel}): an odd number")
    check_choice(where, ("average", "max"), pool=pool)


def _to_unit(score: Float[Array, "B K C"], view: View) -> Array:
    """Scales the finite scores of every head to 0 .. 1; returns 0 for the others."""
    among = (view.positions >= 0) & jnp.isfinite(score)
    low = jnp.min(jnp.where(among, score, jnp.inf), axis=-1, keepdims=True)
    high = jnp.max(jnp.where(among, score, -jnp.inf), axis=-1, keepdims=True)
    span = jnp.where(high > low, high - low, 1.0)
    return jnp.where(among, (score - low) / span, 0.0)


def _join(a: Stats, b: Stats) -> Stats:
    return Stats((a.per_slot, b.per_slot), (a.per_row, b.per_row))


def _member_stats(stats: Stats, index: int) -> Stats:
    return Stats(stats.per_slot[index], stats.per_row[index])


def _member_view(view: View, index: int) -> View:
    """Returns the view with that policy's weights, if there are any."""
    return view._replace(params=view.params[index]) if view.params else view
