"""KeyDiff (Park et al. 2025), arXiv 2504.15364."""

import functools

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.policies.base import Policy, memoized, stateless
from kvjax.types import View


@memoized
def key_diff() -> Policy:
    """Keeps the keys that point away from the average direction.

        score = -cos(key, mean over the live slots of key / |key|)

    Keys that resemble the others are redundant; the distinctive ones carry what a
    later question may ask for, and this is known without asking it. Reads the keys
    once per eviction, so about 1 / (2 p) of attention's traffic while decoding.

    Source: KeyDiff (Park et al. 2025), arXiv 2504.15364.
    """

    def score(view: View) -> Array:
        live = view.positions >= 0
        keys = jnp.where(live[..., None], view.keys().astype(jnp.float32), 0.0)
        norm = jnp.sqrt(jnp.sum(keys * keys, axis=-1))
        per_norm = jnp.where(live, 1.0 / jnp.maximum(norm, 1e-12), 0.0)  # [B, K, C]
        product = functools.partial(jnp.einsum, precision="highest")
        anchor = product("bkcd,bkc->bkd", keys, per_norm)
        count = jnp.maximum(jnp.sum(live, axis=2, keepdims=True), 1)
        anchor = anchor / count.astype(jnp.float32)
        length = jnp.sqrt(jnp.sum(anchor * anchor, axis=-1, keepdims=True))
        anchor = anchor / jnp.maximum(length, 1e-12)
        return -product("bkcd,bkd->bkc", keys, anchor) * per_norm

    return stateless("key_diff", score)
