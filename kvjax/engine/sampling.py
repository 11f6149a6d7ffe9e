"""Choosing the next token from its logits."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.types import UserError, real_number, whole_number

_SEEDS = 2**31 - 1
_GREEDY = 1e-30  # below this quotients overflow, and from there on only ties draw


@dataclasses.dataclass(frozen=True)
class TokenSampler:
    """The distribution that tokens are drawn from; static, see `Sampling`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        real_number("temperature", self.temperature, 0)
        whole_number("top_k", self.top_k, 0)
        if not 0 < real_number("top_p", self.top_p) <= 1:
            raise UserError(f"top_p {self.top_p}: larger than 0, at most 1")
        real_number("min_p", self.min_p, 0, 1)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What is generated for a prompt, and how tokens are chosen.

    Attributes:
      max_new_tokens: the most tokens of a completion.
      temperature: divides the logits. 0 is greedy, as is any value that is too small to
        divide by.
      top_k: draws among the k most likely tokens only; 0 is all of them.
      top_p: draws among the fewest tokens whose probabilities reach this sum
        (Holtzman et al. 2020).
      min_p: draws among the tokens that are at least this many times as likely as the
        most likely one (Nguyen et al. 2024, arXiv 2407.01082).
      stop: texts that end a completion, which does not include them: one or several.
      num_samples, num_beams: completions per prompt, and beams to search with. Only 1
        is supported.
      logprobs: how many tokens' log-probabilities are returned. Only None is supported.
      seed: 0 to 2**31 - 1. A prompt draws the same tokens in any batch.
      ignore_eos: generates all `max_new_tokens`, for throughput runs.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    num_samples: int = 1
    num_beams: int = 1
    logprobs: int | None = None
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise UserError(f"stop is {self.stop!r:.80}: give texts that are not empty")
        object.__setattr__(self, "stop", stop)
        whole_number("max_new_tokens", self.max_new_tokens, 1)
        whole_number("seed", self.seed, 0, _SEEDS)
        for field, only in (("num_samples", 1), ("num_beams", 1), ("logprobs", None)):
            if (value := getattr(self, field)) != only:
                raise UserError(
                    f"{field} {value!r:.40} is not supported yet: leave it out"
                )
        _ = self.sampler  # checks the other fields

    @property
    def sampler(self) -> TokenSampler:
        """The distribution, which programs are compiled for."""
        return TokenSampler(self.temperature, self.top_k, self.top_p, self.min_p)


def sample(
    logits: Float[Array, "B V"],
    sampler: TokenSampler,
    keys: Array,
    position: Int[Array, "B"],
) -> Int[Array, "B"]:
    """One token per row.

    Args:
      logits: float32.
      sampler: the distribution.
      keys: one PRNG key per row, so that a row draws the same alone or in a batch.
      position: the drawn token's position, folded into the row's key.
    """
    if sampler.temperature < _GREEDY:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampler.temperature
    if 0 < sampler.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampler.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampler.top_p < 1:
        logits = jnp.where(logits < _nucleus(logits, sampler.top_p), -jnp.inf, logits)
    if sampler.min_p > 0:
        least = jnp.max(logits, axis=-1, keepdims=True) + math.log(sampler.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    keys = jax.vmap(jax.random.fold_in)(keys, position)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _nucleus(logits: Float[Array, "B V"], top_p: float) -> Float[Array, "B 1"]:
    """The smallest logit among the fewest tokens whose probabilities reach top_p."""
    ranked = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    p = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    return jnp.min(jnp.where(before < top_p, ranked, jnp.inf), axis=-1, keepdims=True)
