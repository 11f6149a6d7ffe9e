"""KeyDiff (Park et al. 2025), arXiv 2504.15364."""

import functools

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.policies.base import Policy, memoized, stateless
from kvjax.types import View


@memoized
def key_diff() -> Policy:
    """Keeps the pairs whose keys differ most from the mean direction of all keys.

        score = -cos(key, mean over the live slots of key / |key|)

    Keys that resemble the others are redundant; distinctive ones hold what a later
    question may ask for. No query is needed to tell them apart. An eviction reads all
    keys once: with p tokens per eviction, decoding reads 1 / (2 p) more than attention.

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
