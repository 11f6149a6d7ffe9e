"""FastGen (Ge et al. 2024), arXiv 2310.01801."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.attention_sums import num_queries
from kvjax.policies.base import (
    Policy,
    check_counts,
    check_range,
    memoized,
    recent_mask,
    scatter_new,
    select_evictions,
    zeros_per_slot,
)
from kvjax.types import Observation, Stats, UserError, View

_SPECIAL, _PUNCTUATION = 1.0, 2.0  # kinds of token; 0 is any other


@memoized
def fastgen(
    recover: float = 0.95,
    sinks: int = 4,
    special: tuple[int, ...] = (),
    punctuation: tuple[int, ...] = (),
    heavy: int = 64,
    local: int = 64,
) -> Policy:
    """Keeps, in each head, the smallest set of pairs that recovers its attention.

        S1 = the first `sinks` tokens and those in `special`
        S2 = S1 and those in `punctuation`
        S3 = S2 and the `heavy` pairs with the largest summed weights among the others
        S4 = S3 and the newest `local` pairs of every query
        S5 = all pairs
        a head's set = the first whose share of the prompt's attention is >= `recover`
        score = average weight within the set, -inf outside, +inf for the sinks

    A head's set is selected during prefill and stays the same while decoding. A head
    that needs few pairs leaves its other slots empty: fewer bytes are live, but as many
    are allocated. If the budget is too small for a head's set, the pairs with the
    lowest average weights are evicted.

    Args:
      recover: share of attention, from 0 to 1; the paper's 0.95.
      sinks: number of first tokens that count as special.
      special: ids of special tokens.
      punctuation: ids of punctuation tokens.
      heavy: number of heavy hitters; 30% of the prompt in the paper.
      local: tokens in the local window; 30% of the prompt in the paper.

    Needs: attn_sum, tokens, and attn_weights, for the weights inside each query's own
      window.
    Source: FastGen (Ge et al. 2024), arXiv 2310.01801, Algorithms 1 and 2; the sinks
      from cold-compress. Shares are of the attention that the live pairs have received,
      which is all attention if prefill evicts nothing.
    Raises:
      UserError: a share outside 0 .. 1, a negative number of pairs, an invalid id.
    """
    check_range("fastgen", 0, 1, recover=recover)
    check_counts("fastgen", 0, sinks=sinks, heavy=heavy, local=local)
    for name, ids in (("special", special), ("punctuation", punctuation)):
        if not isinstance(ids, tuple):
            raise UserError(f"fastgen({name}={ids!r}): a list of token ids")
        for token in ids:
            check_counts("fastgen", 0, token=token)

    def init(spec, batch, capacity):
        pairs = tuple(zeros_per_slot(spec, batch, capacity) for _ in range(3))
        return Stats(pairs, jnp.zeros((batch, spec.num_kv_heads), jnp.int32))

    def sets(slots, view) -> list[Array]:
        attn_sum, _, kind = slots
        first = (view.positions < sinks) | (kind == _SPECIAL)
        second = first | (kind == _PUNCTUATION)
        others = jnp.where(second | (view.positions < 0), -1.0, attn_sum)
        held = jnp.sum(view.positions >= 0, axis=-1, dtype=jnp.int32)
        light = select_evictions(others, view.positions, jnp.maximum(held - heavy, 0))
        light = light | (others < 0)
        third = second | ~light
        return [first, second, third, third | recent_mask(view, local)]

    def choose(slots, view):
        attn_sum, near, _ = slots
        live = view.positions >= 0
        *fixed, _ = sets(slots, view)
        shares = [jnp.sum(attn_sum, axis=-1, where=each & live) for each in fixed]
        outside = live & ~fixed[-1]
        shares.append(shares[-1] + jnp.sum(near, axis=-1, where=outside))
        enough = jnp.sum(attn_sum, axis=-1, where=live) * recover
        short = [share < enough for share in shares]
        return jnp.sum(jnp.cumprod(jnp.stack(short).astype(jnp.int32), axis=0), axis=0)

    def observe(stats, view, observation):
        attn_sum, near, kind = stats.per_slot
        new = _kind(observation, special, punctuation, kind)
        kind = scatter_new(view, observation, new, kind)
        attn_sum = attn_sum + observation.attn_sum
        if not observation.is_prefill:
            return Stats((attn_sum, near, kind), stats.per_row)
        slots = (attn_sum, near + _nearby(view, observation, local), kind)
        return Stats(slots, choose(slots, view))

    def score(stats, view):
        attn_sum = stats.per_slot[0]
        every = jnp.ones_like(attn_sum, dtype=bool)
        choices = jnp.stack([*sets(stats.per_slot, view), every], axis=2)
        choice = stats.per_row[..., None, None]
        kept = jnp.take_along_axis(choices, choice, axis=2)[:, :, 0]
        kept = kept | jnp.isnan(attn_sum)
        average = jnp.where(kept, attn_sum / num_queries(view), -jnp.inf)
        return jnp.where(view.positions < sinks, jnp.inf, average)

    return Policy(
        init=init,
        observe=observe,
        score=score,
        required_stats=frozenset({"attn_sum", "attn_weights", "tokens"}),
        name="fastgen",
        num_pinned=sinks,
    )


def _kind(
    observation: Observation,
    special: tuple[int, ...],
    punctuation: tuple[int, ...],
    like: Float[Array, "B K C"],
) -> Float[Array, "B K T"]:
    def among(ids):
        ids = jnp.asarray(ids or (-1,), jnp.int32)
        return jnp.any(observation.tokens[..., None] == ids[None, None], axis=-1)

    kind = jnp.where(among(punctuation), _PUNCTUATION, 0.0)
    kind = jnp.where(among(special), _SPECIAL, kind)[:, None]
    return jnp.broadcast_to(kind, (*like.shape[:2], kind.shape[-1]))


def _nearby(view: View, observation: Observation, local: int) -> Float[Array, "B K C"]:
    """Returns each pair's attention from queries at most local - 1 tokens later."""
    behind = observation.positions[:, None, :, None] - view.positions[:, :, None]
    inside = (behind < local).astype(jnp.float32)  # [B, K, T, C]
    weights = jnp.einsum("bkgtc,bktc->bkgc", observation.attn_weights, inside)
    return jnp.mean(weights, axis=2)
