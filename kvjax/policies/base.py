"""What a policy is, and the choice that its scores lead to.

A policy answers one question, which pairs matter, by pure functions over arrays. It
knows no model, no layout and no budget, so it runs in anybody's JAX code: see
`Policy`, and `evictions` for turning scores into a choice.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.types import OBSERVABLE, Observation, PyTree, UserError, View

once = functools.cache  # a factory called twice gives one policy: nothing recompiles


class Policy(NamedTuple):
    """Three pure functions and what they ask of attention.

    Attributes:
      init: (spec, B, C) -> stats. A pytree whose leaves all lead with B; those that
        belong to slots lead with [B, K, C] and are zero for a fresh pair, because a
        layout zeroes and moves them with their slots. `spec` is anything with
        `num_kv_heads`, `group` and `head_dim`.
      observe: (stats, view, observation) -> stats, after each attention call.
      score: (stats, view) -> f32[B, K, C]. The highest stay; +inf pins a pair; what
        it says of empty slots is ignored. Ties keep the newer pair.
      needs: what attention must hand over, of {'mass'}. An empty set gets the fastest
        attention there is.
      name: as in the registry, for reports.
      pinned: pairs per head that always stay; a budget must leave room for more.
    """

    init: Callable[..., PyTree]
    observe: Callable[[PyTree, View, Observation], PyTree]
    score: Callable[[PyTree, View], Float[Array, "B K C"]]
    needs: frozenset[str]
    name: str
    pinned: int = 0


def stateless(name: str, score: Callable[[View], Array], pinned: int = 0) -> Policy:
    """A policy that remembers nothing: its score is a function of the view alone."""
    return Policy(
        init=lambda spec, batch, capacity: (),
        observe=lambda stats, view, observation: stats,
        score=lambda stats, view: score(view),
        needs=frozenset(),
        name=name,
        pinned=pinned,
    )


@once
def protect(policy: Policy, sinks: int = 4, recent: int = 32) -> Policy:
    """Pins the first `sinks` and the newest `recent` tokens of every row.

    Attention sinks are StreamingLLM's observation (Xiao et al. 2024, section 3.1); a
    window of recent pairs is common to most rules since H2O.

    Args:
      policy: chooses among the rest.
      sinks: positions 0 .. sinks - 1 stay.
      recent: positions now - recent + 1 .. now stay.

    Raises:
      UserError: a negative number. That the pinned pairs fit a budget is checked where
        the budget is known: before anything is compiled.
    """
    if sinks < 0 or recent < 0:
        raise UserError(
            f"protect(sinks={sinks}, recent={recent}): both must be 0 or more"
        )

    def score(stats, view):
        pinned = (view.pos < sinks) | (view.pos > view.now[:, None, None] - recent)
        return jnp.where(pinned, jnp.inf, policy.score(stats, view))

    return policy._replace(
        score=score,
        name=f"protect({policy.name}, sinks={sinks}, recent={recent})",
        pinned=policy.pinned + sinks + recent,
    )


def evictions(
    score: Float[Array, "B K C"], pos: Int[Array, "B K C"], drop: Int[Array, "B"]
) -> Bool[Array, "B K C"]:
    """Marks the `drop` live slots of every head with the lowest scores.

    Exact, and free of sorting: the threshold is found bit by bit, as in a radix
    descent, in one pass over the scores for each of the 32 bits; ties at the threshold
    give up the older pair, found the same way among positions. Sorting 2,048 slots to
    find 64 of them costs far more on every backend.

    Args:
      score: higher stays; NaN counts as highest.
      pos: position of the pair in each slot, -1 for empty slots (never marked).
      drop: how many to mark per head; 0 leaves a row alone. At most the live ones.
    """
    live = pos >= 0
    drop = jnp.broadcast_to(drop[:, None], score.shape[:2])
    order = _sortable(score)
    threshold = _kth(order, live, drop)
    below = live & (order < threshold[..., None])
    tied = live & (order == threshold[..., None])
    left = drop - jnp.sum(below, axis=-1, dtype=jnp.int32)
    age = pos.astype(jnp.uint32)
    oldest = tied & (age < _kth(age, tied, left)[..., None])
    return below | oldest


def checked(policy: Policy) -> Policy:
    """The policy, or a UserError if it needs what attention cannot hand over."""
    unknown = policy.needs - OBSERVABLE
    if unknown:
        raise UserError(
            f"policy {policy.name!r} needs {sorted(unknown)}: attention can hand over "
            f"{sorted(OBSERVABLE)}"
        )
    return policy


def _sortable(x: Float[Array, "B K C"]) -> Array:
    """float32 as uint32 in the same order; -0 and 0 are the same number."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _kth(order: Array, among: Bool[Array, "B K C"], k: Array) -> Array:
    """Per head, the largest threshold that at most k of `among` lie below."""

    def try_bit(i, threshold):
        candidate = threshold | (jnp.uint32(1 << 31) >> jnp.uint32(i))
        below = among & (order < candidate[..., None])
        count = jnp.sum(below, axis=-1, dtype=jnp.int32)
        return jnp.where(count <= k, candidate, threshold)

    zero = jnp.zeros(order.shape[:2], jnp.uint32)
    return jax.lax.fori_loop(0, 32, try_bit, zero)
