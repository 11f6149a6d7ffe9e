"""Budget rules that depend on the model's shape only."""

import functools
from collections.abc import Sequence

import numpy as np

from kvjax.cache import head_groups
from kvjax.cache.budgets.base import BudgetRule, largest_remainders
from kvjax.types import UserError, whole_number


@functools.cache
def uniform() -> BudgetRule:
    """Gives every head the same size."""
    return BudgetRule("uniform", lambda spec, mean: (mean,) * spec.num_layers)


@functools.cache
def proportional(length: int | None = None) -> BudgetRule:
    """Gives every head the same share of the pairs that its queries can see.

    Layers with a sliding window get smaller sizes than the others. In a model without
    windows, all layers get the mean.

    Args:
      length: tokens of the longest prompt. None is the `length` of `make_spec`.
    """
    if length is not None:
        length = whole_number("proportional(length)", length, 1)

    def allocate(spec, mean):
        windows = map(spec.sliding_window, range(spec.num_layers))
        visible = np.array([min(window or length, length) for window in windows])
        return largest_remainders(mean * visible / visible.mean())

    of_length = proportional if length is None else None
    return BudgetRule("proportional", allocate, of_length=of_length)


def explicit(sizes: Sequence[int | Sequence[int]]) -> BudgetRule:
    """Gives the sizes of a sequence, per layer or per layer and head.

    Raises:
      UserError: no sequence; from `allocate`, sizes that do not add up.
    """
    if isinstance(sizes, str) or not np.iterable(sizes):
        raise UserError(f"explicit(sizes={sizes!r}): give one size per layer")
    return _explicit(tuple(tuple(x) if np.iterable(x) else x for x in sizes))


@functools.cache
def _explicit(sizes: tuple[head_groups.Sizes, ...]) -> BudgetRule:
    return BudgetRule("explicit", lambda spec, mean: sizes)
