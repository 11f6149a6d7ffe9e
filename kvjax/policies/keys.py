"""Rules that look at the keys; attention need hand over nothing."""

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.policies.base import Policy, once, stateless
from kvjax.types import View


@once
def key_diff() -> Policy:
    """Keeps the keys that point away from the average direction.

        score = -cos(key, mean over the live slots of key / |key|)

    Keys that resemble the others are redundant; the distinctive ones carry what a
    later question may ask for, and this is known without asking it. Reads the keys
    once per eviction, so about 1/p of attention's traffic while decoding.

    Source: KeyDiff (Park et al. 2025), section 4.
    """

    def score(view: View) -> Array:
        live = (view.pos >= 0)[..., None]
        keys = jnp.where(live, view.keys().astype(jnp.float32), 0.0)
        norm = jnp.sqrt(jnp.sum(keys * keys, axis=-1, keepdims=True))
        unit = keys / jnp.maximum(norm, 1e-12)
        count = jnp.maximum(jnp.sum(live, axis=2), 1).astype(jnp.float32)
        anchor = jnp.sum(unit, axis=2) / count  # [B, K, D]
        length = jnp.sqrt(jnp.sum(anchor * anchor, axis=-1, keepdims=True))
        anchor = anchor / jnp.maximum(length, 1e-12)
        return -jnp.einsum("bkcd,bkd->bkc", unit, anchor, precision="highest")

    return stateless("key_diff", score)
