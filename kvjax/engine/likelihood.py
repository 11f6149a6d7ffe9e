"""Log-likelihoods of continuations after contexts, under a compressed cache."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.cache.spec import CacheSpec
from kvjax.engine import jobs, memory, runner, tokenization
from kvjax.engine.jobs import Job
from kvjax.engine.planner import plan_job
from kvjax.types import Model, UserError

Tokens = Sequence[int]
# Continuations are padded to these lengths, and beyond to multiples of the last.
_WIDTHS = (16, 128, 1024)


class Likelihood(NamedTuple):
    """The likelihood of one continuation.

    Attributes:
      logprob: natural logarithm of its probability.
      greedy: whether each of its tokens was the most likely one.
    """

    logprob: float
    greedy: bool


class _Context(NamedTuple):
    """A context, and the indices of the pairs that share it."""

    tokens: tuple[int, ...]
    pairs: list[int]


def likelihoods(
    model: Model,
    config: CacheSpec,
    pairs: Sequence[tuple[Tokens, Tokens]],
    memory_bytes: int,
    *,
    most: int | None = None,
    done: Callable[[int], object] = lambda count: None,
) -> list[Likelihood]:
    """Returns the likelihood of each pair's continuation after its context.

    The context is read as a prompt and compressed as the schedule says; then the
    continuation's tokens are read as if they had been generated. Schedules that
    compress only prompts (`after_prefill`, `prefill_only`) evict nothing of the
    continuation. A context that several continuations share is read once. Pairs of any
    lengths run in batches that fill the memory. A pair's result does not depend on the
    others, unless a budget rule measures the contexts that are read together.

    Args:
      model: the model.
      config: configuration of its KV cache.
      pairs: token ids of a context and of a continuation, one or more each.
      memory_bytes: see `kvjax.engine.memory.device_memory`.
      most: limit of the contexts that are read at once.
      done: called with the number of pairs that a batch has finished.

    Raises:
      UserError: an empty context or continuation; an id outside the vocabulary; a pair
        that exceeds the model's context (the last token is not read and does not
        count); too little memory for one row.
    """
    _check(model, pairs)
    found: dict[int, Likelihood] = {}
    for job, contexts in _jobs(model, config, pairs):
        count = min(most or len(contexts), len(contexts))
        plan = plan_job(job, memory_bytes, count)
        for rows in runner.batches(range(len(contexts)), plan.batch):
            batch = [contexts[row] for row in rows]
            new = dict(_scored(runner.of_plan(model.params, plan), batch, pairs))
            found |= new
            done(len(new))
            memory.trim()  # of the batch's state
    return [found[i] for i in range(len(pairs))]


def windows(
    tokens: list[int], prefix: int, length: int
) -> list[tuple[list[int], list[int]]]:
    """Cuts a text into (context, continuation) pairs; continuations make up the text.

    Every window but the last predicts `length` tokens from the one before them; the
    last predicts what is left, from as much text as fits.
    """
    whole = [prefix, *tokens]
    cuts = []
    for start in range(0, len(tokens), length):
        end = min(start + length, len(tokens))
        first = max(0, end - length)  # of the window, in `whole`
        cuts.append((whole[first : start + 1], whole[start + 1 : end + 1]))
    return cuts


def _check(model: Model, pairs: Sequence[tuple[Tokens, Tokens]]) -> None:
    room = model.spec.context_length
    for index, (context, continuation) in enumerate(pairs):
        tokenization.check_ids(model, f"context {index}", context)
        tokenization.check_ids(model, f"continuation {index}", continuation)
        if len(context) + len(continuation) - 1 > room:
            raise UserError(
                f"context {index} of {len(context)} tokens and its continuation of "
                f"{len(continuation)} exceed the context of {model.spec.name}, {room} "
                "tokens and one that is only predicted: shorten the context"
            )


def _jobs(
    model: Model, config: CacheSpec, pairs: Sequence[tuple[Tokens, Tokens]]
) -> Iterator[tuple[Job, list[_Context]]]:
    """Groups contexts of similar length, each group with its job, the longest first."""
    shared: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, (context, _) in enumerate(pairs):
        shared[tuple(context)].append(index)
    groups = defaultdict(list)
    for tokens, indices in shared.items():
        width = _width(max(len(pairs[i][1]) for i in indices))
        groups[jobs.size_class(config, len(tokens)), width].append(
            _Context(tokens, indices)
        )
    for (_, width), contexts in sorted(groups.items(), reverse=True):
        contexts.sort(key=lambda context: len(context.tokens), reverse=True)
        size = jobs.bucket(model.spec, config, len(contexts[0].tokens), 0)
        job = jobs.job_of(model, config, size, width)
        yield dataclasses.replace(job, scored=True), contexts


def _width(length: int) -> int:
    fitting = [width for width in _WIDTHS if length <= width]
    return fitting[0] if fitting else -(-length // _WIDTHS[-1]) * _WIDTHS[-1]


def _scored(
    run: runner.Whole,
    contexts: list[_Context],
    pairs: Sequence[tuple[Tokens, Tokens]],
) -> Iterator[tuple[int, Likelihood]]:
    """Scores every context's first continuation, then the second, and so on."""
    job = run.job
    read = run.prefill([context.tokens for context in contexts])
    for turn in range(max(len(context.pairs) for context in contexts)):
        tokens = np.zeros((job.batch, job.max_new_tokens), np.int32)
        lengths = np.zeros((job.batch,), np.int32)
        rows = [row for row, c in enumerate(contexts) if turn < len(c.pairs)]
        for row in rows:
            continuation = pairs[contexts[row].pairs[turn]][1]
            lengths[row] = len(continuation)
            tokens[row, : lengths[row]] = continuation
        found = run.score(read, tokens, lengths)
        for row in rows:
            total = float(np.sum(found.logprob[row], dtype=np.float64))
            greedy = bool(found.greedy[row].all())
            yield contexts[row].pairs[turn], Likelihood(total, greedy)
