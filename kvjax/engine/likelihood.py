"""How likely given continuations of given contexts are, under a compressed cache."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.cache.spec import CacheSpec
from kvjax.engine import api, jobs, memory, runner
from kvjax.engine.jobs import Job
from kvjax.engine.planner import plan_job
from kvjax.types import Model, UserError

Tokens = Sequence[int]
_WIDTHS = (16, 128, 1024)  # continuations are padded to these, then to multiples


class Likelihood(NamedTuple):
    """Of one continuation.

    Attributes:
      logprob: natural logarithm of its probability.
      greedy: whether each of its tokens was the likeliest.
    """

    logprob: float
    greedy: bool


class _Context(NamedTuple):
    """A context, and by their numbers the continuations asked of it."""

    tokens: tuple[int, ...]
    asked: list[int]


def likelihoods(
    model: Model,
    config: CacheSpec,
    pairs: Sequence[tuple[Tokens, Tokens]],
    memory_bytes: int,
    *,
    most: int | None = None,
    done: Callable[[int], object] = lambda count: None,
) -> list[Likelihood]:
    """The likelihood of each pair's continuation after its context.

    The context is read as a prompt, block by block, and compressed as the schedule
    says; then the continuation's tokens are fed as if they had been generated. Under a
    schedule that only compresses prompts (`after_prefill`, `prefill_only`), what the
    continuation adds stays. A context that several continuations share is read once.
    Pairs of any lengths run in batches that fill the memory, and each gets what it
    would get alone, unless a budget rule measures the contexts that are read together.

    Args:
      model: the model.
      config: what is kept of its KV cache.
      pairs: token ids of a context and of a continuation, one or more each.
      memory_bytes: see `kvjax.engine.memory.device_memory`.
      most: no more contexts are read at once.
      done: called with the number of pairs that were just finished.

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
            some = [contexts[row] for row in rows]
            new = dict(_judged(runner.of_plan(model.params, plan), some, pairs))
            found |= new
            done(len(new))
            memory.trim()  # of the batch's state
    return [found[i] for i in range(len(pairs))]


def windows(
    tokens: list[int], prefix: int, length: int
) -> list[tuple[list[int], list[int]]]:
    """Cuts a text into (context, continuation) whose continuations add up to the text.

    Every window but the last predicts `length` tokens from the one before them; the
    last predicts what is left, from as much text as fits.
    """
    whole = [prefix, *tokens]
    cuts = []
    for start in range(0, len(tokens), length):
        end = min(start + length, len(tokens))
        first = max(0, end - length)  # of the tokens that are read, in `whole`
        cuts.append((whole[first : start + 1], whole[start + 1 : end + 1]))
    return cuts


def _check(model: Model, pairs: Sequence[tuple[Tokens, Tokens]]) -> None:
    room = model.spec.context_length
    for index, (context, given) in enumerate(pairs):
        api.check_ids(model, f"context {index}", context)
        api.check_ids(model, f"continuation {index}", given)
        if len(context) + len(given) - 1 > room:
            raise UserError(
                f"context {index} of {len(context)} tokens and its continuation of "
                f"{len(given)} exceed the context of {model.spec.name}, {room} tokens "
                "and one that is only predicted: shorten the context"
            )


def _jobs(
    model: Model, config: CacheSpec, pairs: Sequence[tuple[Tokens, Tokens]]
) -> Iterator[tuple[Job, list[_Context]]]:
    """Contexts of like size with what is done to them, the largest first."""
    asked: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, (context, _) in enumerate(pairs):
        asked[tuple(context)].append(index)
    groups = defaultdict(list)
    for tokens, indices in asked.items():
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


def _judged(
    run: runner.Whole,
    contexts: list[_Context],
    pairs: Sequence[tuple[Tokens, Tokens]],
) -> Iterator[tuple[int, Likelihood]]:
    """One batch: every context's first continuation, then every second, and so on."""
    job = run.job
    read = run.prefill([context.tokens for context in contexts])
    for turn in range(max(len(context.asked) for context in contexts)):
        tokens = np.zeros((job.batch, job.max_new_tokens), np.int32)
        lengths = np.zeros((job.batch,), np.int32)
        rows = [row for row, c in enumerate(contexts) if turn < len(c.asked)]
        for row in rows:
            given = pairs[contexts[row].asked[turn]][1]
            tokens[row, : len(given)], lengths[row] = given, len(given)
        found = run.score(read, tokens, lengths)
        for row in rows:
            total = float(np.sum(found.logprob[row], dtype=np.float64))
            greedy = bool(found.greedy[row].all())
            yield contexts[row].asked[turn], Likelihood(total, greedy)
