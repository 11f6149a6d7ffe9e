"""PyramidKV (Cai et al. 2024), arXiv 2406.02069: less in deeper layers."""

import functools

import numpy as np

from kvjax.cache.budgets.base import BudgetRule, check_least, largest_remainders
from kvjax.types import real_number, whole_number


def pyramid(beta: float = 20.0, window: int = 0, least: int = 1) -> BudgetRule:
    """Gives sizes that fall linearly from the first layer to the last.

        k[L - 1] = window + (mean - window) / beta
        k[0]     = 2 mean - k[L - 1]

    and linear in between, rounded by largest remainders.

    Args:
      beta: slope, 1 (uniform) or more; 20 in the authors' code.
      window: pairs per head that every layer keeps outside the pyramid: the paper's
        alpha, SnapKV's window. 0 is none.
      least: the smallest size of the last layer, in pairs per head.

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
