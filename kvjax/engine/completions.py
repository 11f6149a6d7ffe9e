"""Completions: what users get for their prompts, whole or piece by piece."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from kvjax.engine.beams import Beam
from kvjax.engine.requests import Request
from kvjax.engine.sampling import Tokens
from kvjax.engine.scheduler import Event
from kvjax.engine.text_stream import TextStream


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the N new tokens of a completion.

    They are natural logarithms of the model's own distribution: temperature, penalty
    and filters change what is drawn, not what is returned.

    Attributes:
      tokens: of the tokens drawn.
      top_tokens: the `Sampling.logprobs` likeliest tokens at each place, the likeliest
        first.
      top: their log-probabilities.
    """

    tokens: Float[np.ndarray, "N"]
    top_tokens: Int[np.ndarray, "N K"]
    top: Float[np.ndarray, "N K"]


@dataclasses.dataclass(frozen=True, repr=False)
class Completion:
    """The completion of one prompt.

    Attributes:
      text: the text that the new tokens add to the prompt, with its leading space, and
        without special tokens or a stop text; None without a tokenizer.
      tokens: the new token ids, with the end token or the stop text's, if there was
        one.
      kept_positions: the positions of the pairs in the cache at the end, in ascending
        order, as `kept_positions[layer][head]`. Prompt and new tokens count from 0. The
        last new token has not been read, so it is not among them; after a stop text,
        tokens that were generated before it was noticed are. A layer with a sliding
        window holds no more than its window.
      prompt: the number of its prompt.
      sample: which of the prompt's samples it is.
      finish_reason: "stop" (an end token or a stop text) or "length".
      logprobs: log-probabilities of the tokens; None unless asked for.
      score: of a beam, see `kvjax.engine.beams.Beam`; None for others. `kept_positions`
        of a beam is empty.
    """

    text: str | None
    tokens: list[int]
    kept_positions: list[list[np.ndarray]]
    prompt: int = 0
    sample: int = 0
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None
    score: float | None = None

    def __repr__(self) -> str:
        said = "no text" if self.text is None else f"{self.text!r:.200}"
        if self.score is not None:
            return f"Completion({said}, {len(self.tokens)} tokens; {self.score:.4g})"
        sizes = [len(head) for layer in self.kept_positions for head in layer]
        least, most = min(sizes, default=0), max(sizes, default=0)
        pairs = f"{least}" if least == most else f"{least} to {most}"
        return (
            f"Completion({said}, {len(self.tokens)} tokens; {pairs} pairs kept in each "
            f"of {len(sizes)} heads)"
        )


@dataclasses.dataclass(frozen=True)
class Piece:
    """The next part of a completion, see `kvjax.Engine.stream`.

    Attributes:
      prompt: the number of its prompt.
      sample: which of the prompt's samples it belongs to.
      text: the next characters, never part of one; "" without a tokenizer.
      tokens: ids drawn since the last piece. Their text may come with a later piece.
      completion: the whole completion, in its last piece; else None.
    """

    prompt: int
    sample: int
    text: str
    tokens: list[int]
    completion: Completion | None = None


class Output:
    """The completion of one request while it is generated.

    Args:
      tokenizer: of the model; None gives no text.
      request: one sample.
    """

    def __init__(self, tokenizer: Any, request: Request):
        self._request = request
        self._tokens: list[int] = []
        self._logprobs: list[Tokens] = []
        self._text, self._sent = "", 0
        self._stream = None
        if tokenizer is not None:
            stop = request.sampling.stop
            self._stream = TextStream(tokenizer, request.tokens, stop)

    def stops(self, tokens: Sequence[int]) -> bool:
        """Returns whether the text of all tokens so far holds a stop text."""
        new = tokens[len(self._tokens) :]
        self._tokens.extend(new)
        if self._stream is None:
            return False
        self._text += self._stream.push(new)
        return self._stream.ended

    def add(self, event: Event) -> Piece:
        """Returns what an event of the request adds."""
        if not self._request.sampling.stop:
            self.stops([*self._tokens, *event.tokens])
        if event.logprobs is not None:
            self._logprobs.append(event.logprobs)
        completion = self._completed(event) if event.finish_reason else None
        text, self._sent = self._text[self._sent :], len(self._text)
        number, sample = self._request.number, self._request.sample
        return Piece(number, sample, text, event.tokens, completion)

    def of_beam(self, beam: Beam, ends: Collection[int]) -> Completion:
        """Returns the completion that a beam search found; `ends` are end tokens."""
        self.stops(beam.tokens)
        reason = "stop" if beam.tokens[-1] in ends else "length"
        event = Event(self._request, beam.tokens, None, reason, kept=[])
        return dataclasses.replace(self._completed(event), score=beam.score)

    def _completed(self, event: Event) -> Completion:
        tokens = self._tokens
        if self._stream is not None:
            self._text += self._stream.finish()
            tokens = tokens[: self._stream.tokens_used]
        return Completion(
            text=self._text if self._stream is not None else None,
            tokens=tokens,
            kept_positions=event.kept,
            prompt=self._request.number,
            sample=self._request.sample,
            finish_reason=event.finish_reason,
            logprobs=self._all_logprobs(len(tokens)),
        )

    def _all_logprobs(self, count: int) -> TokenLogprobs | None:
        """Returns those of the first tokens, as many as the request asks for."""
        asked = self._request.sampling.logprobs
        if asked is None:
            return None
        join = lambda *steps: np.concatenate(steps)[:count]
        found = jax.tree.map(join, *self._logprobs)
        top_tokens, top = found.top_tokens[:, :asked], found.top_logprobs[:, :asked]
        return TokenLogprobs(found.logprob, top_tokens, top)
