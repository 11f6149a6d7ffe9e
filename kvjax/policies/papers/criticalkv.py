"""CriticalKV (Feng et al. 2025), arXiv 2502.03805."""

import jax.numpy as jnp

from kvjax.policies.base import (
    Policy,
    check_range,
    memoized,
    scatter_new,
    select_evictions,
    validate,
    zeros_per_slot,
)
from kvjax.policies.papers.snapkv import snapkv
from kvjax.types import Stats


def criticalkv(
    policy: Policy | None = None, first: float = 0.5, epsilon: float = 1e-4
) -> Policy:
    """Keeps what another policy ranks highest, weighted by its part of the output.

        size  = mean over G of the L1 norm of value . W_o
        score = +inf                               for the floor(first * num_keep)
                                                   pairs highest under `policy`
                (score of `policy` + epsilon) * size   for the others

    An attention weight says how much of a value is added to the output, not how large
    the value is after the output projection W_o. The first stage keeps the pairs with
    the highest scores whatever their size.

    Args:
      policy: a policy whose scores are at least 0; None is `snapkv()`.
      first: share of the kept pairs that the first stage keeps; the paper's 0.5.
      epsilon: added to every score before it is multiplied by the size.

    Needs: output_norm, one number for each new pair, and what `policy` needs (queries,
      for `snapkv`).
    Source: CriticalKV (Feng et al. 2025), arXiv 2502.03805; epsilon from the released
      code.
    Raises:
      UserError: `policy` is no policy, a share outside 0 .. 1, a negative or infinite
        epsilon.
    """
    return _criticalkv(snapkv() if policy is None else policy, first, epsilon)


@memoized
def _criticalkv(policy: Policy, first: float, epsilon: float) -> Policy:
    validate(policy)
    check_range("criticalkv", 0, 1, first=first)
    check_range("criticalkv", 0, float("inf"), epsilon=epsilon)

    def init(spec, batch, capacity):
        kept = policy.init(spec, batch, capacity)
        size = zeros_per_slot(spec, batch, capacity)
        return Stats((kept.per_slot, size), kept.per_row)

    def inner(stats):
        return Stats(stats.per_slot[0], stats.per_row)

    def observe(stats, view, observation):
        kept, size = policy.observe(inner(stats), view, observation), stats.per_slot[1]
        size = scatter_new(view, observation, observation.output_norm, size)
        return Stats((kept.per_slot, size), kept.per_row)

    def score(stats, view):
        raw = policy.score(inner(stats), view)
        held = jnp.sum(view.positions >= 0, axis=-1, dtype=jnp.int32)
        num_first = (first * view.num_keep.astype(jnp.float32)).astype(jnp.int32)
        best = ~select_evictions(raw, view.positions, held - num_first)
        weighted = jnp.where(
            jnp.isfinite(raw), (raw + epsilon) * stats.per_slot[1], raw
        )
        return jnp.where(best & ~jnp.isnan(raw), jnp.inf, weighted)

    return Policy(
        init=init,
        observe=observe,
        score=score,
        required_stats=policy.required_stats | {"output_norm"},
        name="criticalkv" if policy is snapkv() else f"criticalkv({policy.name})",
        num_pinned=policy.num_pinned,
        needs_all_heads=policy.needs_all_heads,
        even=policy.even,
    )
