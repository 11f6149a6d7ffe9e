"""L2 norm (Devoto et al. 2024), arXiv 2406.11430."""

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.policies.base import Policy, memoized, stateless
from kvjax.types import View


@memoized
def key_norm() -> Policy:
    """Keeps the keys of the smallest norm.

        score = -|key|

    In trained decoders a small norm of a key goes with high attention to it.

    Source: L2 norm (Devoto et al. 2024), arXiv 2406.11430. The authors leave the first
      two layers alone; give those layers a larger budget for that.
    """

    def score(view: View) -> Array:
        keys = view.keys().astype(jnp.float32)
        return -jnp.sqrt(jnp.sum(keys * keys, axis=-1))

    return stateless("key_norm", score)
