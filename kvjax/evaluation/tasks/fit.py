"""Prompts that grow until they are as long as a length allows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvjax.evaluation.tasks.base import Example, Task, encode
from kvjax.types import UserError

_ENDLESS = 10**9  # tokens: nothing is cut


class Draft(NamedTuple):
    """An example's text at one size; `depth` 0..1 where one place is asked for."""

    prompt: str
    answers: tuple[str, ...]
    primer: str
    depth: float | None = None


class Writer(NamedTuple):
    """Writes an example at any size.

    Attributes:
      write: `(seed, size) -> Draft`. The seed is one for `stream`; what a smaller size
        draws from it should open what a larger one draws, so that lengths grow evenly.
      least: the smallest size.
    """

    write: Callable[[tuple[int, ...], int], Draft]
    least: int


def stream(seed: tuple[int, ...], purpose: int) -> np.random.Generator:
    """Random numbers for one purpose of one example, apart from those for another."""
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

    Args:
      task: says how a prompt is encoded.
      writer: what is written. Example i has the seed `(seed, i)`.
      tokenizer: a transformers tokenizer.
      count: number of examples.
      seed: with `count` and the writer, all that is drawn.
      length: most tokens of a prompt (chat template, primer and special tokens
        included) and of `reserved` together.
      reserved: tokens of `length` that the answer may take.

    Raises:
      UserError: `count` below 1, or `length` does not hold the smallest size.
    """
    if count < 1:
        raise UserError(f"count must be at least 1, got {count}")
    size, made = writer.least, []
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
        made.append(_example(draft, f"{length}-{seed}-{index}", length))
    return made


def largest(fits: Callable[[int], bool], least: int, start: int) -> int:
    """The largest size that fits, where sizes up to some size do and `least` does.

    The search spreads from `start`: a guess that is off by d costs about 2 log2(d).
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
