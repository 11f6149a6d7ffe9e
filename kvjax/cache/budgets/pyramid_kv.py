"""PyramidKV (Cai et al. 2024), arXiv 2406.02069: less in deeper layers."""

import functools

import numpy as np

from kvjax.cache.budgets.base import BudgetRule, check_least, largest_remainders
from kvjax.types import real_number, whole_number


def pyramid(beta: float = 20.0, window: int = 0, least: int = 1) -> BudgetRule:
    """Sizes fall with depth along a line: much in the first layer, little in the last.

        k[L - 1] = window + (mean - window) / beta
        k[0]     = 2 mean - k[L - 1]

    and on the line in between; in whole numbers by largest remainders.

    Args:
      beta: how steep, 1 (all layers alike) or more; the 20 of the authors' code.
      window: pairs per head that every layer keeps aside from the pyramid: the paper's
        alpha, the window of SnapKV. 0: none.
      least: pairs per head that the last layer keeps at least.

    Source: PyramidKV (Cai et al. 2024), arXiv 2406.02069, section 3.2.

    Raises:
      UserError: an option out of range; from `allocate`, `window` or `least` above the
        mean.
    """
    return _pyramid(
        real_number("pyramid(beta)", beta, 1),
        whole_number("pyramid(window)", window, 0),
        whole_number("pyramid(least)", least, 1),
    )


@functools.cache
def _pyramid(beta: float, window: int, least: int) -> BudgetRule:
    def allocate(spec, mean):
        check_least("pyramid", max(window, least), mean)
        last = max(window + (mean - window) / beta, least)
        line = np.linspace(2 * mean - last, last, spec.num_layers)
        return largest_remainders(line if len(line) > 1 else [mean])

    return BudgetRule("pyramid", allocate)
