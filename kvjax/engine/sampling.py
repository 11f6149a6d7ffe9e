"""Choosing the next token from its logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.types import UserError, real_number, whole_number

_GREEDY = 1e-30  # below this quotients overflow, and from there on only ties draw


@dataclasses.dataclass(frozen=True)
class TokenSampler:
    """How tokens are drawn; static.

    Attributes:
      temperature: 0 is greedy, as is what is too small to divide by; otherwise
        logits are divided by it.
      top_k: draw among the k most likely tokens only; 0 is all of them.
      top_p: draw among the fewest tokens whose probabilities reach this sum
        (Holtzman et al. 2020).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        real_number("temperature", self.temperature, 0)
        whole_number("top_k", self.top_k, 0)
        if not 0 < real_number("top_p", self.top_p) <= 1:
            raise UserError(f"top_p {self.top_p}: larger than 0, at most 1")


def sample(
    logits: Float[Array, "B V"],
    how: TokenSampler,
    keys: Array,
    position: Int[Array, "B"],
) -> Int[Array, "B"]:
    """One token per row.

    Args:
      logits: float32.
      how: the rule.
      keys: one PRNG key per row, so that a row draws the same alone or in a batch.
      position: the drawn token's position, folded into the row's key.
    """
    if how.temperature < _GREEDY:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / how.temperature
    if 0 < how.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, how.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if how.top_p < 1:
        logits = jnp.where(logits < _nucleus(logits, how.top_p), -jnp.inf, logits)
    keys = jax.vmap(jax.random.fold_in)(keys, position)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _nucleus(logits: Float[Array, "B V"], top_p: float) -> Float[Array, "B 1"]:
    """The smallest logit among the fewest tokens whose probabilities reach top_p."""
    ranked = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    p = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    return jnp.min(jnp.where(before < top_p, ranked, jnp.inf), axis=-1, keepdims=True)
