"""R-KV (Cai et al. 2025), arXiv 2505.24133."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.base import Policy, check_counts, check_range, memoized, recent_mask
from kvjax.policies.combinators import check_pooling
from kvjax.policies.ordering import pooled
from kvjax.policies.recent_queries import (
    in_window,
    recent_query_policy,
    scaled_products,
)
from kvjax.types import View


@memoized
def r_kv(
    window: int = 8, kernel: int = 7, weight: float = 0.1, alike: float = 0.5
) -> Policy:
    """Keeps pairs that the last queries attend to and that other keys do not repeat.

        importance = mean over the last `window` queries of softmax over the other
                     pairs of max over G of q . key / sqrt(D), max-pooled
        redundancy = softmax over all pairs of the sum of the cosines of a key with the
                     others / the number of all pairs
        score      = +inf for the newest `window` pairs
                     weight * importance - (1 - weight) * redundancy for the others

    Reasoning models repeat themselves, and attention ranks every repetition high. A
    key's cosine with the newest key that is similar to it (cosine above `alike`) does
    not count, so that one of a group of similar keys is kept. The cosines take C * C
    numbers per head; rows of the batch are processed one at a time.

    Args:
      window: number of last queries, and of newest pairs that are never evicted; the
        authors' 8.
      kernel: number of neighbouring pairs over which importance is pooled, odd; the
        authors' 7.
      weight: of importance, from 0 to 1; the paper's 0.1, the released code's 0.07.
      alike: cosine above which two keys are similar, from -1 to 1; the authors' 0.5.

    Needs: queries, the last `window` of which are stored.
    Source: R-KV (Cai et al. 2025), arXiv 2505.24133; the maximum over G is the code's.
      For a key that is similar to no other, that code drops the cosine with the first
      key; here all cosines count.
    Raises:
      UserError: a window below 1, an even kernel, a weight or cosine out of range.
    """
    check_counts("r_kv", 1, window=window)
    check_pooling("r_kv", kernel, "max")
    check_range("r_kv", 0, 1, weight=weight)
    check_range("r_kv", -1, 1, alike=alike)

    def score(ring, view):
        recent = recent_mask(view, window)
        among = (view.positions >= 0) & ~recent
        logits = jnp.max(scaled_products(ring, view), axis=2)  # [B, K, W, C]
        seen = among[:, :, None]
        if view.scoring.local_window:
            seen = seen & in_window(ring, view)
        share = jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1)
        if view.scoring.local_window:  # a query may see none of the others
            share = jnp.where(seen, share, 0.0)
        there = (ring.after > 0).astype(jnp.float32)  # [B, W]
        count = jnp.maximum(jnp.sum(there, axis=1), 1.0)[:, None, None]
        importance = jnp.einsum("bkwc,bw->bkc", share, there) / count
        importance = pooled(importance, view.positions, among, kernel, "max")
        mixed = weight * importance - (1 - weight) * _redundancy(view, alike)
        return jnp.where(recent, jnp.inf, mixed)

    return recent_query_policy("r_kv", window, score, num_pinned=window)


def _redundancy(view: View, alike: float) -> Float[Array, "B K C"]:
    """Returns the softmax over live pairs of each key's mean cosine with the others."""

    def of_row(row: tuple[Array, Array]) -> Float[Array, "K C"]:
        keys, pos = row
        live = pos >= 0
        itself = jnp.eye(pos.shape[1], dtype=bool)[None]
        both = live[:, :, None] & live[:, None, :] & ~itself
        norm = jnp.sqrt(jnp.sum(keys * keys, axis=-1, keepdims=True))
        unit = keys / jnp.maximum(norm, 1e-12)
        cosine = jnp.einsum("kcd,ked->kce", unit, unit, precision="highest")
        same = jnp.where(both & (cosine > alike), pos[:, None, :], -1)
        newest_same = (same == jnp.max(same, axis=-1, keepdims=True)) & (same >= 0)
        cosine = jnp.where(both & ~newest_same, cosine, 0.0)
        count = jnp.maximum(jnp.sum(live, axis=-1, keepdims=True), 1)
        mean = jnp.sum(cosine, axis=1) / count.astype(jnp.float32)
        return jax.nn.softmax(jnp.where(live, mean, -1e30), axis=-1)

    return jax.lax.map(of_row, (view.keys().astype(jnp.float32), view.positions))
