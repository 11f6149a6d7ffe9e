"""Codecs in NumPy, a group at a time, and the errors that Gaussian values must have.

Independent of kvjax: formulas of the codecs' docstrings, from values to values, without
what is stored in between.
"""

import math

import ml_dtypes
import numpy as np

BFLOAT16, FLOAT8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def sixteen(x):
    return np.float32(BFLOAT16(x))


def symmetric(x, bits):
    """One group [S] of b bits around 0."""
    most = 2 ** (bits - 1) - 1
    scale = sixteen(np.max(np.abs(x)) / np.float32(most))
    if scale == 0:
        return np.zeros_like(x)
    return scale * np.clip(np.rint(x / scale), -most, most)


def centred(x, bits):
    """One group [S] of b bits around the middle of its range."""
    half = 2 ** (bits - 1)
    centre = sixteen(x.min() / 2 + x.max() / 2)
    scale = sixteen(np.max(np.abs(x - centre)) / np.float32(half - 0.5))
    if scale == 0:
        return np.full_like(x, centre)
    codes = np.clip(np.floor((x - centre) / scale), -half, half - 1)
    return scale * (codes + np.float32(0.5)) + centre


def with_outliers(x, bits, count):
    """`symmetric`, the `count` largest of the group [S] aside."""
    order = np.argsort(-np.abs(x), kind="stable")[:count]
    rest = x.copy()
    rest[order] = 0
    found = symmetric(rest, bits)
    found[order] = x[order].astype(BFLOAT16)
    return found


def float8(x):
    """One head [D] with one scale."""
    scale = sixteen(np.max(np.abs(x)) / np.float32(448))
    if scale == 0:
        return np.zeros_like(x)
    return scale * np.clip(x / scale, -448, 448).astype(FLOAT8).astype(np.float32)


def by_groups(rule, group=None):
    """[..., D] with a rule for every `group` of its channels, or for all of them."""

    def run(x):
        parts = x.reshape(-1, group or x.shape[-1])
        return np.stack([rule(part) for part in parts]).reshape(x.shape)

    return run


# What is rounded to the nearest of `levels(M)`, where M is the largest of n Gaussians.


def even_levels(bits):
    """Of `symmetric`, as multiples of the largest magnitude."""
    most = 2 ** (bits - 1) - 1
    return np.arange(-most, most + 1) / most


def float8_levels():
    every = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float64)
    return np.unique(every[np.isfinite(every)]) / 448


def density(x):
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x):
    return np.vectorize(lambda at: math.erfc(-at / math.sqrt(2)) / 2)(x)


def error_within(low, high, levels):
    """Mean squared error of a Gaussian value between these, at its nearest level."""
    x = np.linspace(low, high, 4001)
    nearest = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]
    weights = density(x)
    return np.sum((x - nearest) ** 2 * weights) / np.sum(weights)


def error_symmetric(levels, count, outliers=0):
    """E (x - x')^2 over groups of `count` Gaussians, `outliers` of them exact.

    The largest of the others, M, is the order statistic of n - r among n magnitudes;
    it is on the grid, and the n - r - 1 below it are Gaussians between -M and M.
    """
    most = np.linspace(0.05, 6, 400)
    inside = 2 * below(most) - 1
    others = count - outliers - 1
    chances = density(most) * inside**others * (1 - inside) ** outliers
    errors = np.array([error_within(-m, m, m * levels) for m in most])
    return others / count * np.sum(chances * errors) / np.sum(chances)


def error_centred(bits, count):
    """The same on a grid between the least and the largest of a group."""
    steps = np.linspace(0, 1, 2**bits)
    total = weight = 0.0
    for low in np.linspace(-5, 1, 61):
        for high in np.linspace(-1, 5, 61):
            if high <= low:
                continue
            between = below(high) - below(low)
            chance = density(low) * density(high) * between ** (count - 2)
            if chance > 1e-12:
                grid = low + (high - low) * steps
                total += chance * error_within(low, high, grid)
                weight += chance
    return (count - 2) / count * total / weight
