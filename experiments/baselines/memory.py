"""Estimates the bytes of transformers and kvpress, and searches for a batch size.

The estimate counts the tensors that PyTorch holds at once in a Llama-like decoder that
reads a prompt in one call: `DynamicCache` concatenates keys, then values, layer by
layer; a press compresses each layer before the next one runs; the gated MLP has the
largest activations. The search starts at the estimate; measured peaks decide.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Shape(NamedTuple):
    """The shape of a model; `element` bytes per number, `weights` bytes in total."""

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
        """Returns the bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element


class Work(NamedTuple):
    """The work of every row.

    Attributes:
      prompt, new: tokens read and written.
      kept: pairs per head after the prompt; None for all.
      chunk: prompt tokens read at a time; None for all.
      policy: of `presses.LABELS`, None for none.
      window: number of last queries whose attention the press recomputes.
      eager: whether attention weights are materialized.
    """

    prompt: int
    new: int
    kept: int | None = None
    chunk: int | None = None
    policy: str | None = None
    window: int = 0
    eager: bool = False


def count_bytes(shape: Shape, work: Work, batch: int) -> dict[str, int]:
    """Returns the peak bytes of each phase, weights included."""
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
    """Returns the bytes of queries, keys, values and attention in one layer."""
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
    """Returns a press' temporary bytes per row, besides keys and values."""
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
    """Returns a press' bytes shared by all rows: rotations to 512 positions."""
    if work.policy != "expected_attention":
        return 0
    return 3 * 512 * shape.head_dim**2 * shape.element


class Trial(NamedTuple):
    """A batch that was tried.

    Attributes:
      batch: its rows.
      bytes: peak bytes of each phase that ran, weights included; empty if unknown.
      why: "" if it fits; else the reason why not.
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
    """Returns the batch to try next, or None if the trials hold the largest that fits.

    The first guess uses `count`; later ones scale it by the last trial's bytes. If
    those are unknown, a fitting guess stands, and otherwise the interval is halved.

    Args:
      count: estimates the bytes of a batch, weights included.
      weights: bytes of the weights.
      trials: so far.
      limit: in bytes, for all.
      most: the number of rows available.
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
    """Returns the largest batch that fits, or 0."""
    return _between(trials, 0)[0]


def _between(trials: Sequence[Trial], most: int) -> tuple[int, int]:
    """Returns the largest batch that fits, and the smallest that does not."""
    high = min((each.batch for each in trials if each.why), default=None)
    fits = [t.batch for t in trials if not t.why and (high is None or t.batch < high)]
    return max(fits, default=0), most + 1 if high is None else high
