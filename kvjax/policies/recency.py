"""Rules that look at positions alone; attention need hand over nothing."""

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.policies.base import Policy, once, protect, stateless
from kvjax.types import View


@once
def recency() -> Policy:
    """Keeps the newest pairs: score = position.

    The "sliding window" row of most comparisons; with a budget of 2 it is Batch-Max's
    ED (Algorithm 2).
    """
    return stateless("recency", _position)


@once
def streaming(sinks: int = 4) -> Policy:
    """Attention sinks and the newest pairs, at their true positions.

        score = +inf for positions below `sinks`, else the position

    Args:
      sinks: how many of the first tokens stay; the paper's 4.

    Source: StreamingLLM (Xiao et al. 2024), section 3.2. The paper renumbers the
      positions inside the cache; here pairs keep the positions they were made with.
    Raises:
      UserError: a negative number of sinks.
    """
    return protect(recency(), sinks=sinks, recent=0)._replace(name="streaming")


@once
def random(seed: int = 0) -> Policy:
    """Keeps a uniform random sample of the row: the null hypothesis.

    Every (head, position) draws one priority from a hash of the seed; the highest
    stay. The kept set is thus a uniform sample whatever the block size, and the same
    for a prompt alone or in a batch.

    Args:
      seed: draws another sample.
    """

    def score(view: View) -> Array:
        heads = jnp.arange(view.pos.shape[1], dtype=jnp.uint32)[None, :, None]
        mixed = _hash(jnp.uint32(seed % 2**32) + heads * jnp.uint32(0x9E3779B9))
        return _unit(_hash(mixed ^ view.pos.astype(jnp.uint32)))

    return stateless("random", score)


def _position(view: View) -> Array:
    return view.pos.astype(jnp.float32)


def _hash(x: Array) -> Array:
    """A 32-bit finaliser with full avalanche (Wellons 2018, "lowbias32")."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _unit(bits: Array) -> Array:
    """Uniform in [0, 1): the top 24 bits, all that float32 holds."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
