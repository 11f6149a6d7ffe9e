"""L2 norm (Devoto et al. 2024), arXiv 2406.11430."""

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.policies.base import Policy, memoized, stateless
from kvjax.types import View


@memoized
def key_norm() -> Policy:
    """Keeps the pairs whose keys have the smallest L2 norm.

        score = -|key|

    In trained decoders, keys of small norm receive much attention.

    Source: L2 norm (Devoto et al. 2024), arXiv 2406.11430. The authors do not compress
      the first two layers; give these layers a larger budget to do the same.
    """

    def score(view: View) -> Array:
        keys = view.keys().astype(jnp.float32)
        return -jnp.sqrt(jnp.sum(keys * keys, axis=-1))

    return stateless("key_norm", score)
