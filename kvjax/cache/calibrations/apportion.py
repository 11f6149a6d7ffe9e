"""Divides a number of KV pairs in proportion to weights, within bounds."""

import math

import numpy as np
from jaxtyping import Float, Int

from kvjax.types import UserError, whole_number


def apportion(
    weights: Float[np.ndarray, "*N"],
    total: int,
    least: int,
    most: int,
    multiple: int = 1,
) -> Int[np.ndarray, "*N"]:
    """Returns sizes in proportion to weights that add up to `total` exactly.

    Hamilton's method of largest remainders: one scale times the weights, clipped to the
    bounds, is rounded down to multiples; the remainder goes, a multiple each, to the
    sizes that rounding reduced most. Ties are broken by index, so equal arguments
    give equal sizes on every machine.

    Args:
      weights: finite and above 0.
      total: sum of the sizes.
      least: lower bound of every size.
      most: upper bound of every size.
      multiple: sizes are multiples of it, except those at a bound, and at most one that
        takes the remainder of the total.

    Returns:
      int64, in the shape of the weights.

    Raises:
      UserError: a weight that is not above 0, or a total that the bounds do not allow.
    """
    flat = np.asarray(weights, np.float64).ravel()
    if not flat.size or not np.all(np.isfinite(flat) & (flat > 0)):
        raise UserError(f"weights {flat!s:.80}: give one or more numbers above 0")
    least = whole_number("least size", least, 0)
    most = whole_number("most", most, least)
    multiple = whole_number("multiple", multiple, 1)
    low, high = least * flat.size, most * flat.size
    if not low <= whole_number("total", total) <= high:
        raise UserError(
            f"a total of {total} cannot be divided into {flat.size} sizes of "
            f"{least} to {most} each: give {low} to {high}"
        )
    ideal = proportional(flat, total, least, most)
    sizes = np.maximum(np.floor(ideal / multiple).astype(np.int64) * multiple, least)
    left = total - int(sizes.sum())
    # Rounded, so that ties do not depend on the last bits of a machine's arithmetic.
    for index in np.argsort(np.round(sizes - ideal, 6), kind="stable"):
        step = min(multiple - sizes[index] % multiple, most - sizes[index], left)
        sizes[index] += step
        left -= step
    return sizes.reshape(np.shape(weights))


def proportional(
    weights: Float[np.ndarray, "*N"], total: float, least: float, most: float
) -> Float[np.ndarray, "*N"]:
    """Returns clip(scale * weights, least, most), scaled so that the sum is `total`.

    The sum is piecewise linear in the scale, with knots where a weight reaches a bound.
    """
    scales = np.unique(np.concatenate([least / weights, most / weights]))
    sums = [math.fsum(np.clip(scale * weights, least, most)) for scale in scales]
    return np.clip(np.interp(total, sums, scales) * weights, least, most)
