"""Policies that look at positions only: the baselines of most comparisons."""

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.policies.base import (
    Policy,
    check_counts,
    head_numbers,
    memoized,
    recent_mask,
    stateless,
)
from kvjax.types import View, whole_number


@memoized
def recency() -> Policy:
    """Keeps the newest pairs.

        score = position

    This is the "recent only" baseline of most comparisons: a sliding window as wide as
    the budget. With a budget of 2 it is Batch-Max's ED.

    Source: Batch-Max (Metel et al. 2024), arXiv 2412.05693, Algorithm 2, for ED.
    """
    return stateless("recency", _position)


@memoized
def sliding_window(window: int = 4096) -> Policy:
    """Keeps the last `window` tokens only.

        score = position of the newest `window` pairs, -inf for the others

    Like `recency`, but with a window of its own: an eviction drops all pairs beyond the
    window, even if the budget has room for them. With a budget of `window`, and one
    token per block and eviction, it equals the rolling buffer of models that were
    trained with a sliding window.

    Args:
      window: number of newest tokens to keep; Mistral-7B's 4,096.

    Source: Mistral 7B (Jiang et al. 2023), arXiv 2310.06825, rolling buffer cache.
    Raises:
      UserError: a window below 1.
    """
    check_counts("sliding_window", 1, window=window)

    def score(view: View) -> Array:
        return jnp.where(recent_mask(view, window), _position(view), -jnp.inf)

    return stateless("sliding_window", score)


@memoized
def random(seed: int = 0) -> Policy:
    """Keeps a uniform random sample of the pairs.

        score = hash(seed, head, position), uniform in 0 .. 1

    So the kept set is a uniform sample whatever the block size, and a prompt keeps the
    same pairs alone and in a batch.

    Args:
      seed: of the hash.

    Source: none; the baseline that every other policy has to beat.
    Raises:
      UserError: a seed that is no whole number.
    """
    seed = whole_number("random(seed)", seed)

    def score(view: View) -> Array:
        heads = head_numbers(view).astype(jnp.uint32)[None, :, None]
        mixed = _hash(jnp.uint32(seed % 2**32) + heads * jnp.uint32(0x9E3779B9))
        return _unit(_hash(mixed ^ view.positions.astype(jnp.uint32)))

    return stateless("random", score)


def _position(view: View) -> Array:
    return view.positions.astype(jnp.float32)


def _hash(x: Array) -> Array:
    """Hashes 32 bits with full avalanche (Wellons 2018, "lowbias32")."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _unit(bits: Array) -> Array:
    """Returns the top 24 bits, float32's precision, as a number in [0, 1)."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
