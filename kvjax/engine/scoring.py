"""Scores given tokens by teacher forcing: one jitted program, as those of `steps`."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache.spec import CacheSpec
from kvjax.engine.forward import forward
from kvjax.models import decoder
from kvjax.types import ModelSpec, PyTree

_CHUNK = 16  # tokens read at a time where nothing is evicted any more


class Scores(NamedTuple):
    """Log-probabilities of given tokens.

    Attributes:
      logprob: natural logarithm of each token's probability.
      greedy: whether the token was the most likely one.
      logits: float32, those before each token, if they were asked for.
    """

    logprob: Float[Array, "B N"]
    greedy: Bool[Array, "B N"]
    logits: Float[Array, "N B V"] | None


@functools.partial(jax.jit, static_argnames=("spec", "config", "keep_logits"))
def score(
    params: PyTree,
    state: cache.KVState,
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    spec: ModelSpec,
    config: CacheSpec,
    keep_logits: bool = False,
) -> tuple[cache.KVState, Scores]:
    """Scores given continuations by teacher forcing.

    Tokens are read one at a time, as decoding would. Where the result is the same, they
    are read in chunks: the schedule evicts nothing more, no codec keeps the newest
    pairs unquantized, and the logits are not asked for. Chunks are never wider than one
    of the prompt, for which the state has room. The state is not donated: several
    continuations may follow one prompt.

    Args:
      params: the model's weights, see `with_policy`.
      state: the state after the prompt.
      logits: those that follow each row's last token.
      tokens: continuations, left-aligned.
      lengths: tokens per row; 0 for a row that has none.
      spec: the model's shape.
      config: configuration of the cache.
      keep_logits: whether to return all logits, [N, B, V].

    Returns:
      The state (which has not read the last token), and the scores; 0 and True beyond
      a row's length.
    """
    batch, length = tokens.shape
    layers = range(spec.num_layers)
    residual = any(config.codec_of(index).residual_length for index in layers)
    one = config.schedule.evicts_in_decode or residual or keep_logits
    width = 1 if one else min(_CHUNK, length, config.schedule.prefill_chunk)
    steps = jnp.maximum(jnp.max(lengths) - 1 + width - 1, 0) // width
    room = -length % width + width  # the last chunk's targets are one token ahead
    padded = jnp.pad(tokens, ((0, 0), (0, room)))

    def judge(logits, targets):
        found = logprobs(logits, targets)
        return (*found, logits) if keep_logits else found

    def step(i, carry):
        state, kept = carry
        block = jax.lax.dynamic_slice_in_dim(padded, i * width, width, axis=1)
        targets = jax.lax.dynamic_slice_in_dim(padded, i * width + 1, width, axis=1)
        n = jnp.clip(lengths - 1 - i * width, 0, width)
        hidden, state = forward(params, spec, block, n, state, config)
        flat = decoder.logits(params, hidden.reshape(-1, hidden.shape[-1]), spec)
        found = judge(flat.reshape(batch, width, -1), targets)
        put = lambda all, new: jax.lax.dynamic_update_slice_in_dim(
            all, new, i * width + 1, axis=1
        )
        return state, jax.tree.map(put, kept, found)

    def first(found):
        empty = jnp.zeros((batch, padded.shape[1], *found.shape[2:]), found.dtype)
        return empty.at[:, :1].set(found)

    kept = jax.tree.map(first, judge(logits[:, None], tokens[:, :1]))
    state, kept = jax.lax.fori_loop(0, steps, step, (state, kept))
    logprob, greedy, *rest = (found[:, :length] for found in kept)
    every = jnp.swapaxes(rest[0], 0, 1) if keep_logits else None
    return state, masked_scores(logprob, greedy, every, lengths)


def logprobs(
    logits: Float[Array, "*N V"], targets: Int[Array, "*N"]
) -> tuple[Float[Array, "*N"], Bool[Array, "*N"]]:
    """Returns the log-probability of each target, and whether it is the most likely."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return chosen - jax.nn.logsumexp(logits, axis=-1), likeliest == targets


def masked_scores(
    logprob: Float[Array, "B N"],
    greedy: Bool[Array, "B N"],
    logits: Float[Array, "N B V"] | None,
    lengths: Int[Array, "B"],
) -> Scores:
    """Returns scores that are 0 and True beyond each row's length."""
    real = jnp.arange(logprob.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
    return Scores(jnp.where(real, logprob, 0.0), greedy | ~real, logits)
