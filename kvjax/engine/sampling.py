"""Choosing the next token from its logits."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.types import Struct, UserError, real_number, whole_number

_SEEDS = 2**31 - 1
_MOST_LOGPROBS = 20
_GREEDY = 1e-30  # below this quotients overflow, and from there on only ties draw


@dataclasses.dataclass(frozen=True)
class SamplingSpec:
    """What programs are compiled for; everything else of a `Sampling` is data.

    Attributes:
      samples: whether any row may draw at random; else all take the likeliest token.
      logprobs: how many of the likeliest tokens' log-probabilities are returned beside
        the chosen one's; None returns none.
      penalizes: whether any row has a repetition penalty, which takes a flag per row
        and token of the vocabulary.
    """

    samples: bool = False
    logprobs: int | None = None
    penalizes: bool = False

    def union(self, other: "SamplingSpec") -> "SamplingSpec":
        """Returns what programs that serve both are compiled for."""
        asked = [x.logprobs for x in (self, other) if x.logprobs is not None]
        return SamplingSpec(
            samples=self.samples or other.samples,
            logprobs=max(asked, default=None),
            penalizes=self.penalizes or other.penalizes,
        )


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
      repetition_penalty: divides the positive logits of tokens that the prompt or the
        completion holds already, and multiplies the negative ones (Keskar et al. 2019,
        section 4.1, as transformers and vLLM do); 1 changes nothing.
      stop: texts that end a completion, which does not include them: one or several.
      num_samples: completions per prompt. The prompt is read once.
      num_beams: searches for the most likely completion with this many beams, as
        transformers does, in place of drawing tokens; 1 draws. `num_samples` of the
        beams are returned, the best first.
      length_penalty: the beams' scores are divided by their lengths to this power.
      logprobs: how many of the likeliest tokens' log-probabilities are returned for
        each new token, beside its own: 0 to 20; None returns none.
      seed: 0 to 2**31 - 1. A prompt draws the same tokens in any batch.
      ignore_eos: generates all `max_new_tokens`, for throughput runs.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    num_samples: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
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
        whole_number("num_samples", self.num_samples, 1)
        if self.logprobs is not None:
            whole_number("logprobs", self.logprobs, 0, _MOST_LOGPROBS)
        whole_number("num_beams", self.num_beams, 1)
        self._check_beams()
        if real_number("repetition_penalty", self.repetition_penalty) <= 0:
            raise UserError(
                f"repetition_penalty {self.repetition_penalty}: larger than 0; 1 "
                "changes nothing"
            )
        real_number("temperature", self.temperature, 0)
        whole_number("top_k", self.top_k, 0)
        if not 0 < real_number("top_p", self.top_p) <= 1:
            raise UserError(f"top_p {self.top_p}: larger than 0, at most 1")
        real_number("min_p", self.min_p, 0, 1)

    def _check_beams(self) -> None:
        """Raises UserError for fields that beams would not obey."""
        real_number("length_penalty", self.length_penalty, -10, 10)
        if self.num_beams == 1:
            return
        if self.num_samples > self.num_beams:
            raise UserError(
                f"num_samples {self.num_samples} of num_beams {self.num_beams}: at "
                "most all beams can be returned"
            )
        plain = Sampling(self.max_new_tokens)
        names = "temperature", "repetition_penalty", "stop", "logprobs"
        for name in names:
            if getattr(self, name) != getattr(plain, name):
                raise UserError(
                    f"{name} {getattr(self, name)!r:.40} beside num_beams "
                    f"{self.num_beams}: beams keep the likeliest completions of the "
                    f"model itself; leave {name} or num_beams out"
                )

    @property
    def samples(self) -> bool:
        """True if tokens are drawn at random."""
        return self.temperature >= _GREEDY


class Requests(Struct):
    """What every row of a batch generates: data, so that no value of it compiles.

    Attributes:
      temperature: f32[B], 0 for greedy rows.
      top_k: i32[B], 0 for all tokens.
      top_p: f32[B].
      min_p: f32[B].
      repetition_penalty: f32[B], 1 for none.
      left: i32[B], tokens still to draw; 0 for a row that is not in use.
      ends: bool[B], whether an end token ends the row.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    left: Array
    ends: Array


def requests_of(every: Sequence[Sampling], rows: int) -> Requests:
    """Returns the requests of B rows, on the host; rows beyond `every` are idle."""
    idle = [Sampling(max_new_tokens=1)] * (rows - len(every))
    column = lambda name, dtype: np.asarray(
        [getattr(each, name) for each in (*every, *idle)], dtype
    )
    in_use = np.arange(rows) < len(every)
    return Requests(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        left=np.where(in_use, column("max_new_tokens", np.int32), np.int32(0)),
        ends=~column("ignore_eos", bool),
    )


def spec_of(every: Iterable[Sampling]) -> SamplingSpec:
    """Returns what programs that serve all of these are compiled for."""
    each = [
        SamplingSpec(one.samples, one.logprobs, one.repetition_penalty != 1)
        for one in every
    ]
    return functools.reduce(SamplingSpec.union, each, SamplingSpec())


class Tokens(NamedTuple):
    """Tokens that were drawn, one per row, and their log-probabilities if asked for.

    Attributes:
      token: i32[B]; -1 for a row that drew none.
      logprob: f32[B], natural logarithms, before temperature and filters.
      top_tokens: i32[B, N], the likeliest tokens in descending order.
      top_logprobs: f32[B, N].

    Those of several steps have an axis of steps after the first.
    """

    token: Array
    logprob: Array | None = None
    top_tokens: Array | None = None
    top_logprobs: Array | None = None


def sample(
    logits: Float[Array, "B V"],
    requests: Requests,
    keys: Array,
    position: Int[Array, "B"],
) -> Int[Array, "B"]:
    """Draws one token per row.

    Args:
      logits: float32.
      requests: the distribution of every row.
      keys: one PRNG key per row, so that a row draws the same alone or in a batch.
      position: the drawn token's position, folded into the row's key.
    """
    greedy = requests.temperature < _GREEDY
    logits = logits / jnp.where(greedy, 1.0, requests.temperature)[:, None]
    filters = ~greedy & ((requests.top_k > 0) | (requests.top_p < 1))
    filtered = jax.lax.cond(
        jnp.any(filters), lambda: _filtered(logits, requests), lambda: logits
    )
    least = jnp.max(filtered, axis=-1) + jnp.log(requests.min_p)
    filtered = jnp.where(filtered < least[:, None], -jnp.inf, filtered)
    keys = jax.vmap(jax.random.fold_in)(keys, position)
    drawn = jax.vmap(jax.random.categorical)(keys, filtered)
    return jnp.where(greedy, likeliest(logits), drawn.astype(jnp.int32))


def likeliest(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """Returns each row's token of the largest logit."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _filtered(logits: Float[Array, "B V"], requests: Requests) -> Float[Array, "B V"]:
    """Sets the logits that top_k and then top_p exclude to -inf."""
    size = logits.shape[-1]
    top_k = jnp.where(requests.top_k > 0, jnp.minimum(requests.top_k, size), size)
    ranked = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    of_k = jnp.take_along_axis(ranked, top_k[:, None] - 1, axis=-1)
    ranked = jnp.where(ranked < of_k, -jnp.inf, ranked)
    p = jax.nn.softmax(ranked, axis=-1)
    before, top_p = jnp.cumsum(p, axis=-1) - p, requests.top_p[:, None]
    inside = (before < top_p) | (top_p >= 1)
    of_p = jnp.min(jnp.where(inside, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < jnp.maximum(of_k, of_p), -jnp.inf, logits)
