"""Scissorhands (Liu et al. 2023), arXiv 2305.17118."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt

from kvjax.policies.base import Policy, check_counts, memoized, real_mask, recent_mask
from kvjax.types import Observation, Stats


@memoized
def scissorhands(history: int = 400, recent: int = 10) -> Policy:
    """Keeps the pairs that recent queries rarely gave less than the mean weight 1 / t.

        score = +inf for the newest `recent` pairs
                -(queries among the last `history` whose weight on the pair
                  was below 1 / t),  t = tokens of the text up to the query's own

    Pairs that were important stay important: the paper's persistence of importance. The
    history takes one bit per query and pair, `history` / 8 bytes per pair.

    Args:
      history: number of last queries that count; the paper's 400.
      recent: number of newest pairs that are never evicted; the paper's 10.

    Needs: attn_weights, in full, because every query has its own threshold.
    Source: Scissorhands (Liu et al. 2023), arXiv 2305.17118, Algorithms 1 and 2. The
      weights are averaged over the G query heads first. The authors' released code
      implements another policy, see `scissorhands_released`.
    Raises:
      UserError: a history below 1, a negative number of pairs.
    """
    _check("scissorhands", history, recent)

    def low(weights, observation: Observation):
        mean = 1.0 / (observation.positions + 1).astype(jnp.float32)  # [B, T]
        return weights < mean[:, None, :, None]

    def score(count, view):
        return jnp.where(recent_mask(view, recent), jnp.inf, -count)

    return _counting("scissorhands", low, score, history, recent)


@memoized
def scissorhands_released(
    heavy: int = 100, history: int = 100, recent: int = 10
) -> Policy:
    """Keeps only pairs that were among the heaviest of some recent query.

        count = queries among the last `history` that had the pair among the `heavy`
                largest of their weights
        score = +inf  for the newest `recent` pairs
                count for the others with count > 0
                -inf  for the rest: evicted even if the budget has room for them

    Args:
      heavy: number of largest weights per query that count; a tenth of the prompt in
        the authors' code.
      history: number of last queries that count; the authors' 100.
      recent: number of newest pairs that are never evicted; the authors' 10.

    Needs: attn_weights, in full, because every query has its own threshold.
    Source: the code released for Scissorhands (Liu et al. 2023), which simulates the
      cache on a prompt for each query head and has no budget; the paper's threshold of
      1 / t is commented out in it. Here weights are averaged over the G query heads,
      and the lowest counts are evicted when the budget is too small for all.
    Raises:
      UserError: a history or a number of weights below 1, a negative number of pairs.
    """
    _check("scissorhands_released", history, recent)
    check_counts("scissorhands_released", 1, heavy=heavy)

    def high(weights, observation: Observation):
        if heavy >= weights.shape[-1]:  # every slot is among the largest
            return weights > 0
        return weights > jax.lax.top_k(weights, heavy + 1)[0][..., -1:]

    def score(count, view):
        kept = jnp.where(count > 0, count, -jnp.inf)
        return jnp.where(recent_mask(view, recent), jnp.inf, kept)

    return _counting("scissorhands_released", high, score, history, recent)


def _counting(name: str, mark: Callable, score: Callable, history, recent) -> Policy:
    """Returns a policy that counts how many of the last `history` queries mark a pair.

    Args:
      name: of the policy.
      mark: (weights f32[B, K, T, C], observation) -> bool[B, K, T, C].
      score: (counts f32[B, K, C], view) -> f32[B, K, C].
      history: number of last queries.
      recent: number of newest pairs that `score` pins.
    """
    words = -(-history // 32)

    def observe(stats, view, observation):
        weights = jnp.mean(observation.attn_weights, axis=2)
        born = jnp.where(view.positions < 0, jnp.iinfo(jnp.int32).max, view.positions)
        visible = born[:, :, None] <= observation.positions[:, None, :, None]
        marked = mark(weights, observation) & visible
        return Stats(per_slot=_write(stats.per_slot, marked, observation, history))

    def count(stats):
        ones = jax.lax.population_count(stats.per_slot)
        return jnp.sum(ones, axis=-1).astype(jnp.float32)

    return Policy(
        init=lambda spec, batch, capacity: Stats(
            per_slot=jnp.zeros((batch, spec.num_kv_heads, capacity, words), jnp.uint32)
        ),
        observe=observe,
        score=lambda stats, view: score(count(stats), view),
        required_stats=frozenset({"attn_weights"}),
        name=name,
        num_pinned=recent,
    )


def _write(
    bits: UInt[Array, "B K C W"],
    marked: Bool[Array, "B K T C"],
    observation: Observation,
    history: int,
) -> UInt[Array, "B K C W"]:
    """Overwrites the bits of the oldest queries with those of the new ones."""
    last = real_mask(observation, history)
    place = observation.positions % history
    word = jnp.arange(bits.shape[-1], dtype=jnp.int32)[None, None]
    bit = jnp.uint32(1) << (place % 32).astype(jnp.uint32)
    own = last[..., None] & (place[..., None] // 32 == word)
    bit = jnp.where(own, bit[..., None], jnp.uint32(0))  # [B, T, W], no two the same
    stale = jnp.sum(bit, axis=1, dtype=jnp.uint32)[:, None, None]
    fresh = jnp.einsum("bktc,btw->bkcw", marked.astype(jnp.uint32), bit)
    return (bits & ~stale) | fresh


def _check(name: str, history: int, recent: int) -> None:
    check_counts(name, 1, history=history)
    check_counts(name, 0, recent=recent)
