"""Generates prompts as long as a given number of tokens allows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvjax.evaluation.tasks.base import Example, Task, encode
from kvjax.types import UserError

_ENDLESS = 10**9  # tokens, so that nothing is cut


class Draft(NamedTuple):
    """An example's text at one size; `depth` is 0..1 if it hides one thing."""

    prompt: str
    answers: tuple[str, ...]
    primer: str
    depth: float | None = None


class Writer(NamedTuple):
    """Writes an example of any size.

    Attributes:
      write: `(seed, size) -> Draft`. The seed is one for `stream`. The draws of a
        smaller size should be the beginning of a larger one's, so that the length grows
        steadily with the size.
      least: the smallest size.
    """

    write: Callable[[tuple[int, ...], int], Draft]
    least: int


def stream(seed: tuple[int, ...], purpose: int) -> np.random.Generator:
    """Returns an independent random generator for one purpose of one example."""
    return np.random.default_rng((*seed, purpose))


def examples(
    task: Task,
    writer: Writer,
    tokenizer: Any,
    count: int,
    seed: int,
    length: int,
    reserved: int,
) -> list[Example]:
    """Returns `count` examples, each of the largest size that fits.

    Example i has the seed `(seed, i)`. `length` is the most tokens of a prompt (with
    chat template, primer and special tokens) and the `reserved` ones of its answer.

    Raises:
      UserError: `count` is below 1, or `length` cannot hold the smallest size.
    """
    if count < 1:
        raise UserError(f"count must be at least 1, got {count}")
    size, found = writer.least, []
    for index in range(count):

        def tokens(size: int, index: int = index) -> int:
            draft = writer.write((seed, index), size)
            return _tokens(tokenizer, task, draft) + reserved

        if (needed := tokens(writer.least)) > length:
            raise UserError(
                f"length {length} cannot hold the shortest prompt of {task.name}, "
                f"which takes {needed} tokens, {reserved} of them to answer; ask for "
                "a greater length"
            )
        size = largest(lambda n: tokens(n) <= length, writer.least, size)
        draft = writer.write((seed, index), size)
        found.append(_example(draft, f"{length}-{seed}-{index}", length))
    return found


def largest(fits: Callable[[int], bool], least: int, start: int) -> int:
    """Returns the largest size that fits, by exponential and then binary search.

    `fits` must hold up to some size and not above it, and must hold for `least`. The
    search starts at `start`; a start that is off by d costs about 2 log2(d) calls.
    """
    low, step = max(start, least), 1
    if fits(low):
        while fits(high := low + step):
            low, step = high, 2 * step
    else:
        high, low = low, max(low - step, least)
        while not (low == least or fits(low)):
            step *= 2
            high, low = low, max(low - step, least)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _tokens(tokenizer: Any, task: Task, draft: Draft) -> int:
    example = Example("", draft.prompt, draft.answers, draft.primer)
    return len(encode(tokenizer, task, example, _ENDLESS).tokens)


def _example(draft: Draft, name: str, length: int) -> Example:
    depth = () if draft.depth is None else (("depth", draft.depth),)
    details = (*depth, ("length", float(length)))
    return Example(name, draft.prompt, draft.answers, draft.primer, details)
