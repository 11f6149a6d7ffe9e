"""Searches for the largest batch of another library that fits, by measured peaks."""

from collections.abc import Sequence
from typing import NamedTuple


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
    weights: int, trials: Sequence[Trial], limit: int, most: int
) -> int | None:
    """Returns the batch to try next, or None if the trials hold the largest that fits.

    The first is one row. Later ones take a row's bytes from the two largest trials, or
    where the last one's peak is unknown, double the batch, then halve the interval.
    `weights` and `limit` are in bytes, `most` is the number of rows available.
    """
    low, high = _between(trials, most)
    if low + 1 >= high:
        return None
    if not trials:
        return 1
    if trials[-1].peak is None:
        failed = any(trial.why for trial in trials)
        return (low + high) // 2 if failed else min(2 * low, most)
    known = sorted((t.batch, t.peak) for t in trials if t.peak is not None)
    (fewer, less), (batch, peak) = [(0, weights), *known][-2:]
    row = max((peak - less) / (batch - fewer), 1)
    guess = min(batch + int((limit - peak) // row), high - 1)
    return guess if guess > low else None  # no clear room for another row


def largest(trials: Sequence[Trial]) -> int:
    """Returns the largest batch that fits, or 0."""
    return _between(trials, 0)[0]


def _between(trials: Sequence[Trial], most: int) -> tuple[int, int]:
    """Returns the largest batch that fits, and the smallest that does not."""
    high = min((each.batch for each in trials if each.why), default=None)
    fits = [t.batch for t in trials if not t.why and (high is None or t.batch < high)]
    return max(fits, default=0), most + 1 if high is None else high
