"""How many pairs each layer keeps: a rule turns a mean into one size per layer.

::

    allocate            sizes before anything is read
      |   measure       while the prompt is read, in every layer (optional)
      v
    reallocate          sizes after it, from what was measured (optional)

Sizes are integers that add up to the mean times the layers, so that a rule moves memory
between layers and takes none.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from kvjax.registry import Registry
from kvjax.types import ModelSpec, UserError


class BudgetRule(NamedTuple):
    """Three functions, of which the last two come together or not at all.

    Attributes:
      name: for reports.
      allocate: (spec, mean) -> sizes, one per layer, before the prompt is read.
      measure: (before, after), the residual stream [B, T, M] before and after a layer's
        attention -> f32[B, T], a number for every token. Pure, in the program that
        reads; what is asked of `reallocate` is the mean over a prompt's tokens.
      reallocate: (measured float64[L], the mean over the prompts of a batch; mean) ->
        sizes, on the host. Few different ones: every set of sizes is a program.
    """

    name: str
    allocate: Callable[[ModelSpec, int], Sequence[int]]
    measure: Callable[[Array, Array], Float[Array, "B T"]] | None = None
    reallocate: Callable[[np.ndarray, int], Sequence[int]] | None = None


@functools.cache
def uniform() -> BudgetRule:
    """Every layer keeps the same."""
    return BudgetRule("uniform", lambda spec, mean: (mean,) * spec.num_layers)


@functools.cache
def explicit(sizes: tuple[int, ...]) -> BudgetRule:
    """Sizes that somebody has worked out already, one per layer."""
    return BudgetRule("explicit", lambda spec, mean: tuple(sizes))


_REGISTRY = Registry("budget rule")
register, names = _REGISTRY.register, _REGISTRY.names
register("uniform", uniform)
register("explicit", explicit)


def make(rule: BudgetRule | str, **options) -> BudgetRule:
    """The rule of that name, or `module:function` of the user's own; or as it is.

    Raises:
      UserError: an unknown name, something that is no rule, or half of the two
        functions that work together.
    """
    found = _REGISTRY.make(rule, **options) if isinstance(rule, str) else rule
    if not isinstance(found, BudgetRule):
        raise UserError(f"budget rule {rule!r} is no kvjax.cache.budgets.BudgetRule")
    if (found.measure is None) != (found.reallocate is None):
        raise UserError(
            f"budget rule {found.name!r} has one of measure and reallocate: what is "
            "measured is for reallocating, give both or none"
        )
    return found


def allocated(rule: BudgetRule, spec: ModelSpec, mean: int) -> tuple[int, ...]:
    """The sizes that a rule begins with, checked."""
    return _checked(rule, rule.allocate(spec, mean), spec.num_layers, mean)


def reallocated(rule: BudgetRule, measured: np.ndarray, mean: int) -> tuple[int, ...]:
    """The sizes that follow from what was measured, checked."""
    return _checked(rule, rule.reallocate(measured, mean), len(measured), mean)


def _checked(
    rule: BudgetRule, sizes: Sequence[int], layers: int, mean: int
) -> tuple[int, ...]:
    """Raises UserError unless the sizes are ints that add up."""
    sizes = tuple(int(size) if size == int(size) else size for size in sizes)
    if len(sizes) != layers:
        raise UserError(
            f"{len(sizes)} budgets for {layers} layers from the rule {rule.name!r}: "
            "give one per layer"
        )
    if not all(isinstance(size, int) for size in sizes) or sum(sizes) != mean * layers:
        raise UserError(
            f"budget rule {rule.name!r} gives {sizes}, which add up to {sum(sizes)}: "
            f"whole numbers that add up to {mean} x {layers} = {mean * layers} do"
        )
    return sizes
