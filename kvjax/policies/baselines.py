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

    The "recent only" row of most comparisons, a sliding window as wide as the budget;
    with a budget of 2 it is Batch-Max's ED.

    Source: Batch-Max (Metel et al. 2024), arXiv 2412.05693, Algorithm 2, for ED.
    """
    return stateless("recency", _position)


@memoized
def sliding_window(window: int = 4096) -> Policy:
    """Keeps the last `window` tokens and nothing else.

        score = position of the newest `window` pairs, -inf for the others

    As `recency`, but the window is the rule's own: what lies further back goes whenever
    a head drops anything, even if the budget has room for it. With a budget of
    `window`, read and evicted token by token, it is exactly the ring of models trained
    so.

    Args:
      window: tokens that stay; Mistral-7B's 4,096.

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
    """Keeps a uniform random sample of the row: the null hypothesis.

        score = hash(seed, head, position), uniform in 0 .. 1

    The kept set is thus a uniform sample whatever the block size, and the same
    for a prompt alone or in a batch.

    Args:
      seed: draws another sample.

    Source: none; what every other rule has to beat.
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
    """A 32-bit finaliser with full avalanche (Wellons 2018, "lowbias32")."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _unit(bits: Array) -> Array:
    """Uniform in [0, 1): the top 24 bits, all that float32 holds."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
