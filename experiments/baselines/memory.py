"""Bytes that transformers and kvpress should need, and the search for a batch.

Counted from what PyTorch holds at once in a decoder of Llama's kind, read in one call:
`DynamicCache` concatenates keys, then values, of one layer at a time; a press has cut
down the layers below before the next one is read; of a layer's activations the gated
MLP's are the most. The count is where the search begins, running decides.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Shape(NamedTuple):
    """What a model takes; `element` bytes per number, `weights` bytes in all."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    model_dim: int
    ff_dim: int
    vocab: int
    element: int
    weights: int

    @property
    def pair(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element


class Work(NamedTuple):
    """What is asked of every row.

    Attributes:
      prompt, new: tokens read and written.
      kept: pairs per head after the prompt; None for all.
      chunk: prompt tokens read at a time; None for all.
      policy: of `presses.LABELS`, None for none.
      window: last queries that the press weighs anew.
      eager: whether attention weights are there as a whole.
    """

    prompt: int
    new: int
    kept: int | None = None
    chunk: int | None = None
    policy: str | None = None
    window: int = 0
    eager: bool = False


def count_bytes(shape: Shape, work: Work, batch: int) -> dict[str, int]:
    """Bytes at the peak of each phase, the weights included."""
    left = work.prompt if work.kept is None else work.kept
    length = left + work.new
    pairs = shape.layers * left * shape.pair
    below = (shape.layers - 1) * left * shape.pair  # while the last layer attends
    steps = work.chunk or work.prompt
    hidden = steps * shape.model_dim * shape.element
    mlp = 4 * hidden + 3 * steps * shape.ff_dim * shape.element
    attention = 3 * hidden + _attention(shape, work, steps)
    press = 4 * hidden + (work.prompt + left) * shape.pair + _press(shape, work)
    reading = batch * max(pairs + mlp, below + attention)
    pressing = batch * (below + press) + _shared(shape, work)
    writing = (shape.layers + 0.5) * length * shape.pair + shape.vocab * shape.element
    return {
        "prefill": shape.weights + max(reading, pressing),
        "decode": shape.weights + int(batch * writing),
    }


def _attention(shape: Shape, work: Work, steps: int) -> int:
    """Queries, keys, values, and what is made of them in one layer."""
    width = shape.heads * shape.head_dim * shape.element
    whole = work.prompt * shape.pair
    rotated = 4 * steps * width + steps * shape.pair
    attended = 2 * steps * width + whole + steps * shape.pair
    if work.chunk or work.eager:  # a mask, and keys and values for every query head
        attended += 2 * work.prompt * width + steps * work.prompt
    if work.eager:  # float32 weights before and after the softmax, and their mask
        attended += (2 * shape.heads + 1) * steps * work.prompt * 4
    return max(rotated + whole, attended)


def _press(shape: Shape, work: Work) -> int:
    """What a press computes with, beside keys and values."""
    width = shape.heads * shape.head_dim * shape.element * work.prompt
    weights = 4 * shape.heads * work.window * shape.element * work.prompt
    return {
        "snapkv": width + weights,
        "tova": width + weights,
        "key_diff": work.prompt * shape.pair,
        "expected_attention": 2 * width,
        "average_attention": shape.heads * work.prompt**2 * shape.element,
    }.get(work.policy, 0)


def _shared(shape: Shape, work: Work) -> int:
    """What a press computes with whatever the rows: rotations to 512 positions."""
    if work.policy != "expected_attention":
        return 0
    return 3 * 512 * shape.head_dim**2 * shape.element


class Trial(NamedTuple):
    """A batch that was run, or was to be.

    Attributes:
      batch: its rows.
      bytes: at the peak of each phase that was reached, the weights included; empty
        where none is known.
      why: empty if it fits; else what went wrong.
    """

    batch: int
    bytes: dict[str, int]
    why: str = ""

    @property
    def peak(self) -> int | None:
        return max(self.bytes.values(), default=None)


def next_batch(
    count: Callable[[int], float],
    weights: int,
    trials: Sequence[Trial],
    limit: int,
    most: int,
) -> int | None:
    """The batch to try next, or None if the largest that fits is among the trials.

    The first guess is the count's; then the last trial's bytes correct the count.
    Without such a figure the count stands if it fits; else the interval is halved.

    Args:
      count: bytes that a batch should need, the weights included.
      weights: bytes of the weights.
      trials: so far.
      limit: in bytes, for all.
      most: rows that there are.
    """
    low, high = _between(trials, most)
    if low + 1 >= high:
        return None
    factor = 1.0
    if trials:
        last = trials[-1]
        if last.peak is None:
            halve = any(each.why for each in trials)
            return (low + high) // 2 if halve else None
        factor = (last.peak - weights) / (count(last.batch) - weights)

    def corrected(batch):
        return weights + factor * (count(batch) - weights)

    guess = bisect.bisect_right(range(1, high), limit, key=corrected)
    if guess <= low and low:
        return None  # no clear room for another row
    return max(guess, 1)


def largest(trials: Sequence[Trial]) -> int:
    """Rows of the largest batch that fits; 0 if none did."""
    return _between(trials, 0)[0]


def _between(trials: Sequence[Trial], most: int) -> tuple[int, int]:
    """The largest batch that fits and the smallest that does not; `most` can be had."""
    high = min((each.batch for each in trials if each.why), default=None)
    fits = [t.batch for t in trials if not t.why and (high is None or t.batch < high)]
    return max(fits, default=0), most + 1 if high is None else high
