"""Pure functions of next-token logits: repetition penalty, log-probabilities."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def penalized(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, "B"]
) -> Float[Array, "B V"]:
    """Applies a repetition penalty to the logits of tokens that a row has seen.

    A positive logit is divided by the penalty, a negative one multiplied, so a penalty
    above 1 makes the token less likely either way. The formula of Keskar et al. 2019
    (arXiv 1909.05858, section 4.1) divides both; multiplying is what transformers' and
    vLLM's `repetition_penalty` do.

    Args:
      logits: before the temperature.
      seen: tokens of the row's prompt and completion, see `mark_seen`.
      penalty: larger than 0; 1 changes nothing.
    """
    factor = penalty[:, None]
    scaled = jnp.where(logits < 0, logits * factor, logits / factor)
    return jnp.where(seen, scaled, logits)


def mark_seen(
    seen: Bool[Array, "B V"], tokens: Int[Array, "B T"], n: Int[Array, "B"]
) -> Bool[Array, "B V"]:
    """Marks the first n tokens of every row as seen: a prompt's, or the last drawn."""
    real = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < n[:, None]
    marked = jnp.where(real, tokens, seen.shape[1])  # beyond the vocabulary: dropped
    rows = jnp.arange(len(seen), dtype=jnp.int32)[:, None]
    return seen.at[rows, marked].set(True, mode="drop")


def top_logprobs(
    logits: Float[Array, "B V"], token: Int[Array, "B"], count: int
) -> tuple[Float[Array, "B"], Int[Array, "B N"], Float[Array, "B N"]]:
    """Returns log-probabilities of the drawn and of the most likely tokens.

    Args:
      logits: as the model gives them: temperature, penalty and truncation change what
        is drawn, not what is returned.
      token: the token drawn in each row.
      count: N, the number of most likely tokens; 0 to V.

    Returns:
      The natural logarithm of the drawn token's probability, the ids of the N most
      likely tokens, the most likely first, and their log-probabilities.
    """
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
    best, ids = jax.lax.top_k(logprobs, count)
    return chosen, ids.astype(jnp.int32), best
