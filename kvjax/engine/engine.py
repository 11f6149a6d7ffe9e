"""`kvjax.Engine`: a model and a cache configuration, ready for any requests."""

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvjax import messages
from kvjax.cache.config import CacheConfig
from kvjax.cache.prefix import rows_config
from kvjax.cache.spec import CacheSpec, checked
from kvjax.cache.state import capacities
from kvjax.engine import (
    arguments,
    beams,
    compiled,
    contexts,
    jobs,
    likelihood,
    memory,
    planner,
    tokenization,
)
from kvjax.engine.completions import Completion, Output, Piece
from kvjax.engine.contexts import Context
from kvjax.engine.device import DeviceExecutor
from kvjax.engine.jobs import Job, PrefixShape
from kvjax.engine.likelihood import Likelihood
from kvjax.engine.planner import Plan
from kvjax.engine.requests import Request
from kvjax.engine.runner import Whole
from kvjax.engine.sampling import Sampling, SamplingSpec, spec_of
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.tokenization import Prompt
from kvjax.messages import Say, silent
from kvjax.models import fingerprints
from kvjax.types import Model, UserError, whole_number

_STEPS = 32  # most decode steps between two looks at what was drawn
_STREAM_STEPS = 4  # the same while a user waits for the text
_REPORT = 2.0  # seconds between two messages that prompts have ended
_GRAIN = 16  # tokens that capacities are rounded up to


class Engine:
    """Generates completions under one cache configuration, with few fixed programs.

    Requests are data: their number, lengths and sampling compile nothing. Where not all
    requests fit the memory, rows that end take the next ones, whose prompts are read in
    the same steps that decode the other rows. A request's tokens are those that it gets
    alone. They depend on the other prompts only where the budget is a share of the
    longest prompt, or where the budget rule uses that prompt's length ("calibrated",
    "ada") or measures prompts that are read together ("squeeze"); `prompt_tokens` fixes
    that length.

    Programs are compiled at the first requests that need them, and kept within a limit
    that all engines of the process share, see `kvjax.engine.compiled.kept_limit`.

    Args:
      model: from `kvjax.load`.
      cache: what the KV cache keeps, and how.
      memory_gb: see `kvjax.engine.memory.device_memory`.
      max_rows: the most requests that decode together; None is what fits.
      prompt_tokens: the longest prompt to expect; None is the longest of each call.
      show_progress: see `kvjax.messages.progress`.
      **fields: fields of `CacheConfig`, in place of `cache`.

    Raises:
      UserError: a configuration that does not fit the model; all before anything is
        compiled.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheConfig | None = None,
        *,
        memory_gb: float | None = None,
        max_rows: int | None = None,
        prompt_tokens: int | None = None,
        show_progress: bool | None = None,
        **fields: Any,
    ):
        if not isinstance(model, Model):
            raise UserError(f"model is {model!r:.80}: give what kvjax.load returns")
        self.model = model
        self.config = arguments.made(CacheConfig, "cache", cache, fields)
        self._memory = memory.device_memory(memory_gb)
        for name, number in (("max_rows", max_rows), ("prompt_tokens", prompt_tokens)):
            if number is not None:
                whole_number(name, number, 1)
        self._max_rows, self._longest = max_rows, prompt_tokens
        self._show_progress = show_progress
        self._spec = fingerprints.marked(model)
        self._ends = tokenization.end_tokens(model)
        self._sampling = SamplingSpec()  # what the requests so far needed
        self._plans: dict[tuple[Job, int, bool], Job] = {}

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        context: Context | None = None,
        in_order: bool = True,
        truncate: str = "error",
        **fields: Any,
    ) -> list[Completion] | Iterator[Completion]:
        """Completes prompts.

        Args:
          prompts: see `kvjax.generate`.
          sampling: for all prompts, or one for each.
          context: what all prompts go on after, from `read`. It is held once for all of
            them, and keeps the pairs that it has; the prompts' own pairs are all kept,
            and `kept_positions` shows these.
          in_order: False returns an iterator over completions as they end.
          truncate: see `kvjax.generate`.
          **fields: fields of `Sampling`, in place of `sampling`.

        Returns:
          The completions of the first prompt's samples, then the second's, and so on.

        Raises:
          UserError: see `kvjax.generate`.
        """
        requests = self._requests(prompts, sampling, context, truncate, fields)
        if any(each.sampling.num_beams > 1 for each in requests):
            found = self._searched(requests, context)
        else:
            found = self._completed(requests, context)
        if not in_order:
            return found
        return sorted(found, key=lambda each: (each.prompt, each.sample))

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        context: Context | None = None,
        truncate: str = "error",
        **fields: Any,
    ) -> Iterator[Piece]:
        """Yields the completions piece by piece, see `generate`.

        The pieces of a completion's text together are the text that `generate` returns.
        """
        requests = self._requests(prompts, sampling, context, truncate, fields)
        return self.run(requests, context, steps=_STREAM_STEPS)

    def _searched(
        self, requests: list[Request], context: Context | None
    ) -> Iterator[Completion]:
        """Completes requests that search with the same number of beams."""
        asked = {_beams(each.sampling) for each in requests}
        if context is not None or len(asked) > 1:
            raise UserError(
                "beams take a call of their own, without a context: give all prompts "
                "one Sampling, whose other fields but max_new_tokens, num_samples, "
                "length_penalty and ignore_eos say nothing"
            )
        sampling = requests[0].sampling
        found = beams.beam_search(
            self.model,
            self.spec(max(len(each.tokens) for each in requests)),
            [each.tokens for each in requests],
            num_beams=sampling.num_beams,
            num_samples=sampling.num_samples,
            max_new_tokens=sampling.max_new_tokens,
            length_penalty=sampling.length_penalty,
            eos=() if sampling.ignore_eos else self._ends,
            memory_bytes=self._memory,
        )
        for request, sequences in zip(requests, found, strict=True):
            for sample, beam in enumerate(sequences):
                each = dataclasses.replace(request, sample=sample)
                yield Output(self.model.tokenizer, each).of_beam(beam, self._ends)

    def read(self, document: Prompt) -> Context:
        """Reads and compresses a document without any question.

        Raises:
          UserError: see `kvjax.engine.contexts.read_context`.
        """
        (tokens,) = tokenization.tokenize(self.model, [document])
        return contexts.read_context(self.model, self.spec(len(tokens)), tokens)

    def load_context(self, path: str | os.PathLike) -> Context:
        """Reads a context that `Context.save` has written.

        Raises:
          UserError: see `kvjax.engine.contexts.load_context`.
        """
        return contexts.load_context(path, self.model, self.spec)

    def score(
        self, prompts: Sequence[Prompt], continuations: Sequence[Prompt]
    ) -> list[Likelihood]:
        """Returns the log-likelihood of a continuation after each prompt.

        Both are encoded on their own: give token ids where a token spans them. See
        `kvjax.engine.likelihood.likelihoods`.

        Raises:
          UserError: another number of continuations; see `likelihoods`.
        """
        if len(prompts) != len(continuations):
            raise UserError(
                f"{len(prompts)} prompts and {len(continuations)} continuations: give "
                "one continuation for each prompt"
            )
        before = tokenization.tokenize(self.model, prompts)
        after = tokenization.tokenize(self.model, continuations)
        after = [self._without_bos(ids) for ids in after]
        config = self.spec(max(map(len, before)))
        pairs = list(zip(before, after, strict=True))
        return likelihood.likelihoods(
            self.model, config, pairs, self._memory, most=self._max_rows
        )

    def _without_bos(self, ids: list[int]) -> list[int]:
        """Returns the ids of a text that is not the first."""
        bos = getattr(self.model.tokenizer, "bos_token_id", None)
        return ids[1:] if ids[0] == bos and len(ids) > 1 else ids

    def _completed(
        self, requests: list[Request], context: Context | None
    ) -> Iterator[Completion]:
        with messages.progress(len(requests), self._show_progress) as say:
            left, ended, last = len(requests), 0, math.inf  # inf: still compiling
            for piece in self.run(requests, context, say=say):
                last = min(last, time.monotonic())
                if piece.completion is None:
                    continue
                ended += int(piece.sample == 0)
                if ended == left or time.monotonic() - last > _REPORT:
                    say("", ended)
                    left, ended, last = left - ended, 0, time.monotonic()
                    say(f"running {left} more prompts" if left else "", 0)
                yield piece.completion

    def run(
        self,
        requests: Sequence[Request],
        context: Context | None = None,
        *,
        steps: int = _STEPS,
        say: Say = silent,
    ) -> Iterator[Piece]:
        """Yields the pieces of requests that have been checked.

        Those with short prompts run first, so that prompts of similar length are read
        together.

        Args:
          requests: of different numbers.
          context: see `generate`.
          steps: the most decode steps between two pieces of a completion.
          say: receives progress messages.
        """
        outputs: dict[tuple[int, int], Output] = {}

        def output(request: Request) -> Output:
            key = request.number, request.sample
            if key not in outputs:
                outputs[key] = Output(self.model.tokenizer, request)
            return outputs[key]

        scheduler = Scheduler(
            self._executor(requests, context, say),
            stops=lambda request, tokens: output(request).stops(tokens),
            ends=self._ends,
            limit=steps,
        )
        for request in sorted(requests, key=lambda request: len(request.tokens)):
            scheduler.add(request)
        for event in scheduler.run():
            piece = output(event.request).add(event)
            if piece.completion is not None:
                del outputs[piece.prompt, piece.sample]
            yield piece
        del scheduler
        memory.trim()  # returns the state's memory

    def _requests(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None,
        context: Context | None,
        truncate: str,
        fields: dict[str, Any],
    ) -> list[Request]:
        """Returns the checked requests of prompts."""
        ids = tokenization.tokenize(self.model, prompts)
        used = 0
        if context is not None:
            self._check_context(context)
            ids, used = [self._without_bos(each) for each in ids], context.length
        each = _samplings(sampling, fields, len(ids))
        self._check_stops(each)
        fitted = tokenization.fitted(
            self.model, ids, [one.max_new_tokens for one in each], truncate, used
        )
        return [
            Request(number, tuple(tokens), one)
            for number, (tokens, one) in enumerate(zip(fitted, each, strict=True))
        ]

    def _check_stops(self, each: Iterable[Sampling]) -> None:
        stop = next((one.stop for one in each if one.stop), None)
        if stop and self.model.tokenizer is None:
            raise UserError(
                f"stop is {stop!r:.80}, but {self.model.spec.name} has no tokenizer to "
                "find texts with: leave it out"
            )

    def _check_context(self, context: Context) -> None:
        if not isinstance(context, Context):
            raise UserError(
                f"context is {context!r:.80}: give what Engine.read returns"
            )
        context.check(self.model, self.spec(context.length))

    def _executor(
        self, requests: Sequence[Request], context: Context | None, say: Say
    ) -> DeviceExecutor:
        job = self._job(requests, context, say)
        say(f"running {len(requests)} prompts in {job.batch} rows", 0)
        prefix = context and context.prefix
        runner = Whole(self.model.params, job, compiled.programs(job), prefix)
        return DeviceExecutor(runner)

    def _job(
        self, requests: Sequence[Request], context: Context | None, say: Say
    ) -> Job:
        """Returns the rows and programs for requests, planned once per size."""
        longest = max(len(each.tokens) for each in requests)
        config = rows_config(context.config) if context else self.spec(longest)
        self._sampling = self._sampling.union(spec_of(r.sampling for r in requests))
        new = max(each.sampling.max_new_tokens for each in requests)
        job = self._shape(config, longest, new)
        if context is not None:
            shape = PrefixShape(context.config, capacities(context.state))
            job = dataclasses.replace(job, prefix=shape)
        samples = [each.sampling.num_samples for each in requests]
        most = jobs.rounded(sum(samples))
        most = min(most, self._max_rows or most)
        fixed = most >= sum(samples) and max(samples) == 1
        key = job, most, fixed
        if key not in self._plans:
            self._plans[key] = self._planned(job, most, fixed, say).job
        return self._plans[key]

    def _planned(self, job: Job, most: int, fixed: bool, say: Say) -> Plan:
        if job.config.measures:  # all rows share the sizes of the first prompts
            return planner.plan_job(job, self._memory, most, say)
        return planner.plan_requests(job, self._memory, most, fixed, say)

    def _shape(self, config: CacheSpec, longest: int, new: int) -> Job:
        """Returns the job of one row, in sizes that many lengths share."""
        spec = self.model.spec
        size = jobs.bucket(spec, config, longest, 0)
        new = jobs.rounded(new, _GRAIN)
        slots = config.decode_capacity(spec, size, new)
        if slots == config.decode_capacity(spec, size, _GRAIN):
            new = _GRAIN  # more tokens take no more slots
        job = jobs.job_of(self.model, config, size, new, self._sampling, self._ends)
        return dataclasses.replace(job, decode_chunk=_STEPS)

    def spec(self, longest: int) -> CacheSpec:
        """Returns what programs are compiled for, for prompts of up to this length."""
        return checked(self._spec, self.config, self._longest or longest)


def _beams(sampling: Sampling) -> tuple:
    """Returns what beams of one call have in common."""
    count, penalty = sampling.num_beams, sampling.length_penalty
    size = sampling.max_new_tokens, sampling.num_samples
    return count, penalty, *size, sampling.ignore_eos


def _samplings(
    sampling: Sampling | Sequence[Sampling] | None, fields: dict[str, Any], count: int
) -> list[Sampling]:
    """Returns one sampling per prompt."""
    if isinstance(sampling, Sequence) and not isinstance(sampling, str):
        if len(sampling) != count or fields:
            raise UserError(
                f"sampling has {len(sampling)} entries for {count} prompts, and fields "
                f"{sorted(fields)} beside it: give one kvjax.Sampling for all prompts, "
                "or one for each, and no fields"
            )
        for one in sampling:
            arguments.made(Sampling, "sampling", one, {})
        return list(sampling)
    return [arguments.made(Sampling, "sampling", sampling, fields)] * count
