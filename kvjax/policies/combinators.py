"""Policies made of policies: pin, mix, smooth, join in chunks, share between heads.

Each takes policies and gives a policy, so they nest::

    protect(smooth(tova(), kernel=5), sinks=4, recent=32)

What is no policy, such as a name, is a UserError.

A learned rule's weights go along, see `kvjax.policies.base.memoized`.
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

        score = +inf for positions < sinks and the newest `recent`, else the rule's

    A window of recent pairs is common to most rules since H2O.

    Args:
      policy: chooses among the rest.
      sinks: positions 0 .. sinks - 1 stay.
      recent: those of the last `recent` tokens stay.

    Source: StreamingLLM (Xiao et al. 2024), arXiv 2309.17453, for attention sinks.
    Raises:
      UserError: a negative number. That the pinned pairs fit a budget is checked where
        the budget is known: before anything is compiled.
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
    """Weighs two rules against each other.

        score = weight * a's + (1 - weight) * b's, each stretched over 0 .. 1

    Scores of different rules have different units, so each is first stretched over the
    range of its own live pairs, head by head. A pair that either pins stays; one that
    either lets go for good goes, unless the other pins it.

    Args:
      a: one rule.
      b: the other.
      weight: of `a`, from 0 to 1.

    Raises:
      UserError: a weight outside 0 .. 1.
    """
    validate(a)
    validate(b)
    check_range("mix", 0, 1, weight=weight)

    def score(stats, view):
        first = a.score(_part(stats, 0), _own_view(view, 0))
        second = b.score(_part(stats, 1), _own_view(view, 1))
        mixed = weight * _to_unit(first, view) + (1 - weight) * _to_unit(second, view)
        mixed = jnp.where(jnp.isneginf(first) | jnp.isneginf(second), -jnp.inf, mixed)
        mixed = jnp.where(jnp.isposinf(first) | jnp.isposinf(second), jnp.inf, mixed)
        return jnp.where(jnp.isnan(first) | jnp.isnan(second), jnp.nan, mixed)

    return Policy(
        init=lambda *shape: _join(a.init(*shape), b.init(*shape)),
        observe=lambda stats, view, observation: _join(
            a.observe(_part(stats, 0), _own_view(view, 0), observation),
            b.observe(_part(stats, 1), _own_view(view, 1), observation),
        ),
        score=score,
        required_stats=a.required_stats | b.required_stats,
        name=f"mix({a.name}, {b.name}, {weight})",
        num_pinned=a.num_pinned + b.num_pinned,
        needs_all_heads=a.needs_all_heads or b.needs_all_heads,
    )


@memoized
def smooth(policy: Policy, kernel: int = 7, pool: str = "average") -> Policy:
    """Pools the scores along the text, so that a pair's neighbours stay with it.

        score = mean or maximum of the rule's scores over `kernel` neighbours

    Neighbours are the live pairs next to it in the order of positions. Pinned pairs are
    nobody's neighbours, and stay pinned.

    Args:
      policy: the rule.
      kernel: pairs that are pooled; odd, the pair itself in the middle.
      pool: 'average' (zeros beyond the ends count) or 'max'.

    Source: SnapKV (Li et al. 2024), arXiv 2404.14469, does it to attention weights.
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
    """Whole chunks of the text stay or go, by the mean score of what they still hold.

        score = mean over the live pairs with the same position // size

    Words lose their meaning without their neighbours. An eviction drops an exact number
    of pairs, so the one chunk at the border is cut, its older part going first; where
    budget and eviction are multiples of `size` nothing is cut. A chunk with a pinned
    pair is pinned as a whole.

    Args:
      policy: the rule.
      size: tokens in a chunk; the paper's 10.

    Source: ChunkKV (Liu et al. 2025), arXiv 2502.00299.
    Raises:
      UserError: a size below 1.
    """
    validate(policy)
    check_counts("chunked", 1, size=size)

    def score(stats, view):
        raw = policy.score(stats, view)
        mean = segments(raw, view.positions, size)
        # Where one pair of a chunk is pinned and another let go for good.
        return jnp.where(jnp.isnan(mean) & ~jnp.isnan(raw), jnp.inf, mean)

    return policy._replace(
        score=score,
        name=f"chunked({policy.name}, size={size})",
        # What shares a chunk with the last of the sinks, and the first of a window.
        num_pinned=policy.num_pinned and policy.num_pinned + 2 * (size - 1),
    )


@memoized
def shared_heads(policy: Policy) -> Policy:
    """One choice for all heads.

        score = mean of the rule's scores over the K heads

    The heads of a row then hold the same positions, as in rules that drop whole tokens.
    The rule must not pin a pair in one head and let it go in another.

    Args:
      policy: the rule.

    Raises:
      UserError: something that is no policy.
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
    """Heads share a layer's budget: the best pairs stay, whichever head they are in.

        score = the rule's for what stays, -inf for the rest

    When something has to go, the heads of a row together keep floor(total * n) pairs
    times their number, n being what a full head is left with. All pairs compete, except
    that every head keeps its best floor(floor * that) and none keeps more than n, which
    is the fixed shape: budgets say what is allocated, `total` how much of it is live.

    Args:
      policy: the rule; its scores must compare across heads, as attention weights do.
      total: share of all the heads' slots that stays; 1 leaves nothing to share out.
      floor: share of a head's part, total * budget, that it keeps whatever it scores.

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
        every = map(view.gather_heads, (own, view.positions, view.num_keep))
        return jnp.where(own_heads(view, shares(*every)), own, -jnp.inf)

    def shares(raw, pos, keep):
        """bool[B, H, C], what stays of all heads' pairs."""
        held = jnp.sum(pos >= 0, axis=-1, dtype=jnp.int32)  # [B, H]
        full = held > keep
        most = jnp.max(keep, axis=1, keepdims=True, where=full, initial=0)  # n
        part = jnp.floor(total * most.astype(jnp.float32))
        sure = jnp.floor(floor * part).astype(jnp.int32)
        beyond = jnp.maximum(held - most, 0)
        out = select_evictions(raw, pos, beyond)  # of a head's own room
        rivals = jnp.where(out, EMPTY, pos)
        own = ~select_evictions(raw, pos, jnp.maximum(held - sure, 0))  # a head's best
        spare = jnp.sum(jnp.minimum(held, most) - part.astype(jnp.int32), axis=1)
        spare = jnp.maximum(spare, 0)
        flat = (len(raw), 1, -1)
        gone = select_evictions(
            jnp.where(own, jnp.inf, raw).reshape(flat), rivals.reshape(flat), spare
        )
        stays = ~(out | gone.reshape(raw.shape))
        return stays | ~jnp.any(full, axis=1)[:, None, None]

    return policy._replace(
        score=score,
        name=f"per_head({policy.name}, total={total}, floor={floor})",
        num_pinned=math.ceil(policy.num_pinned / total),
        needs_all_heads=True,
    )


@memoized
def by_size(large: Policy, small: Policy, above: float = 1.2) -> Policy:
    """One rule for heads that keep many pairs, another for those that keep few.

        score = large's in heads with |kv| > above * mean over all heads, else small's

    Where all heads keep alike, or nobody says how many, `large` chooses in all.

    Args:
      large: of heads that keep many.
      small: of the others.
      above: from how many times the mean on they are many.

    Raises:
      UserError: a negative number.
    """
    real_number("by_size(above)", above, 0)

    def index(view: View) -> int:
        if view.mean_budget is None or view.budget is None:
            return 0
        return 0 if view.budget > above * view.mean_budget else 1

    def score(stats, view):
        which = index(view)
        rule = (large, small)[which]
        return rule.score(_part(stats, which), _own_view(view, which))

    return mix(large, small)._replace(
        score=score,
        name=f"by_size({large.name}, {small.name}, {above})",
        num_pinned=max(large.num_pinned, small.num_pinned),
    )


def check_pooling(where: str, kernel: int, pool: str) -> None:
    """Raises UserError for an even kernel, one below 1 or an unknown pooling."""
    check_counts(where, 1, kernel=kernel)
    if kernel % 2 == 0:
        raise UserError(f"{where}(kernel={kernel}): an odd number")
    check_choice(where, ("average", "max"), pool=pool)


def _to_unit(score: Float[Array, "B K C"], view: View) -> Array:
    """Finite scores stretched over 0 .. 1, head by head; the others 0."""
    among = (view.positions >= 0) & jnp.isfinite(score)
    low = jnp.min(jnp.where(among, score, jnp.inf), axis=-1, keepdims=True)
    high = jnp.max(jnp.where(among, score, -jnp.inf), axis=-1, keepdims=True)
    span = jnp.where(high > low, high - low, 1.0)
    return jnp.where(among, (score - low) / span, 0.0)


def _join(a: Stats, b: Stats) -> Stats:
    return Stats((a.per_slot, b.per_slot), (a.per_row, b.per_row))


def _part(stats: Stats, index: int) -> Stats:
    return Stats(stats.per_slot[index], stats.per_row[index])


def _own_view(view: View, index: int) -> View:
    """The view with that rule's weights, if there are any."""
    return view._replace(params=view.params[index]) if view.params else view
