"""Shares of kept pairs measured on single texts, and their mean over the texts."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from kvjax.cache.calibrations.apportion import apportion
from kvjax.cache.calibrations.calibration import Calibration, Rows, tuples

SINKS, NEWEST = 4, 16  # first and last pairs of a text, which always count as kept
_GRAIN = 10_000  # shares are multiples of 1 / _GRAIN


class Measured(NamedTuple):
    """Shares measured on single texts, before they are averaged.

    Attributes:
      model, fingerprint, target, tokens, ratios: see `Calibration`.
      floor: pairs of a text that every head keeps.
      shares: [N, R, L, K] of N texts and R ratios.
      similarity: [N, L], see `Calibration`.
      accuracy: [N], see `Calibration`.
      float16: see `Calibration`.
    """

    model: str
    fingerprint: str
    target: str
    tokens: int
    ratios: tuple[float, ...]
    floor: int
    shares: Float[np.ndarray, "N R L K"]
    similarity: Float[np.ndarray, "N L"]
    accuracy: np.ndarray
    float16: str = ""


def kept_shares(
    scores: Float[np.ndarray, "L K T"], ratio: float
) -> Float[np.ndarray, "L K"]:
    """Returns each head's share of kept pairs when one threshold keeps `ratio` of all.

    The first `SINKS` and the last `NEWEST` pairs are kept, whatever their scores.
    Exactly round(ratio * L * K * T) pairs are kept; of equal scores, the first ones.
    """
    scores = np.array(scores)
    scores[..., :SINKS] = scores[..., -NEWEST:] = np.inf
    keep = np.zeros(scores.size, bool)
    keep[np.argsort(-scores, axis=None, kind="stable")[: round(ratio * keep.size)]] = 1
    return keep.reshape(scores.shape).mean(axis=-1)


def average(measured: Measured) -> Calibration:
    """Averages over the texts: shares in multiples of 1e-4 whose means are the ratios.

    No share is less than `floor` pairs of a text, or more than 1.
    """
    means = np.mean(measured.shares, axis=0)
    return Calibration(
        model=measured.model,
        fingerprint=measured.fingerprint,
        target=measured.target,
        num_texts=len(measured.shares),
        tokens=measured.tokens,
        accuracy=round(float(np.mean(measured.accuracy)), 4),
        ratios=measured.ratios,
        shares=tuple(
            whole_shares(mean, ratio, measured.floor, measured.tokens)
            for mean, ratio in zip(means, measured.ratios, strict=True)
        ),
        similarity=tuples(np.mean(measured.similarity, 0, np.float64).round(4)),
        float16=measured.float16,
    )


def whole_shares(
    shares: Float[np.ndarray, "L K"], ratio: float, floor: int, tokens: int
) -> Rows:
    """Rounds shares to multiples of 1e-4 whose mean is exactly the ratio.

    No share is less than `floor` pairs of a text of `tokens` tokens.
    """
    least = math.ceil(floor * _GRAIN / tokens)
    total = round(ratio * shares.size * _GRAIN)
    return tuples(apportion(shares, total, least, _GRAIN) / _GRAIN)


def stability(
    shares: Float[np.ndarray, "N R L K"],
    counts: Sequence[int] = (2, 8, 32),
    splits: int = 20,
) -> dict[int, np.ndarray]:
    """Measures how far shares depend on the texts, by comparing disjoint halves.

    Args:
      shares: of N texts and R ratios.
      counts: numbers of texts in both halves together; those above N are skipped.
      splits: number of random draws, with a fixed seed.

    Returns:
      For every count, [R]: the mean absolute difference between the halves' mean
      shares, over heads and draws.
    """
    rng, found = np.random.default_rng(0), {}
    for count in (count for count in counts if count <= len(shares)):
        drawn = [rng.permutation(len(shares))[:count] for _ in range(splits)]
        halves = [np.split(shares[texts], [count // 2]) for texts in drawn]
        difference = [abs(a.mean(axis=0) - b.mean(axis=0)) for a, b in halves]
        found[count] = np.mean(difference, axis=(0, 2, 3))
    return found
