"""How many pairs each layer, or head, keeps: a rule turns a mean into sizes.

::

    allocate            sizes before anything is read
      |   measure       while the prompt is read, in every layer (optional)
      v
    reallocate          sizes after it, from what was measured (optional)

Sizes are integers that add up to the mean times the layers (and heads), so that a rule
moves memory between them and takes none.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from kvjax.cache import parts
from kvjax.registry import Registry
from kvjax.types import ModelSpec, UserError


class BudgetRule(NamedTuple):
    """Three functions, of which the last two come together or not at all.

    Attributes:
      name: for reports.
      allocate: (spec, mean) -> sizes before the prompt is read: for every layer one, or
        one for each of its heads.
      measure: (before, after), the residual stream [B, T, M] before and after a layer's
        attention -> f32[B, T], a number for every token. Pure, in the program that
        reads; what is asked of `reallocate` is the mean over a prompt's tokens.
      reallocate: (measured float64[L], the mean over the prompts of a batch; mean) ->
        sizes, on the host. Few different ones: every set of sizes is a program.
    """

    name: str
    allocate: Callable[[ModelSpec, int], Sequence[int | Sequence[int]]]
    measure: Callable[[Array, Array], Float[Array, "B T"]] | None = None
    reallocate: Callable[[np.ndarray, int], Sequence[int]] | None = None


@functools.cache
def uniform() -> BudgetRule:
    """Every layer keeps the same."""
    return BudgetRule("uniform", lambda spec, mean: (mean,) * spec.num_layers)


@functools.cache
def explicit(sizes: tuple[parts.Sizes, ...]) -> BudgetRule:
    """Sizes that somebody has worked out already, per layer or per layer and head."""
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


def allocated(rule: BudgetRule, spec: ModelSpec, mean: int) -> tuple[parts.Sizes, ...]:
    """The sizes that a rule begins with, checked."""
    heads = spec.num_kv_heads
    return _checked(rule, rule.allocate(spec, mean), spec.num_layers, heads, mean)


def reallocated(
    rule: BudgetRule, measured: np.ndarray, mean: int
) -> tuple[parts.Sizes, ...]:
    """The sizes that follow from what was measured, checked."""
    return _checked(rule, rule.reallocate(measured, mean), len(measured), 1, mean)


def _checked(
    rule: BudgetRule, given: Sequence, layers: int, heads: int, mean: int
) -> tuple[parts.Sizes, ...]:
    """Raises UserError unless the sizes are ints that add up."""
    if len(given) != layers:
        raise UserError(
            f"{len(given)} budgets for {layers} layers from the rule {rule.name!r}: "
            "give one per layer"
        )
    if not any(map(np.iterable, given)):
        heads = 1  # alike in every layer
    each = [list(sizes) if np.iterable(sizes) else [sizes] * heads for sizes in given]
    if wrong := [sizes for sizes in each if len(sizes) != heads]:
        raise UserError(
            f"budget rule {rule.name!r} gives a layer {len(wrong[0])} sizes for its "
            f"{heads} heads: give one, or one per head"
        )
    flat = [size for sizes in each for size in sizes]
    count = layers * heads
    if any(size != int(size) for size in flat) or sum(flat) != mean * count:
        shown, total = tuple(given), sum(flat)
        raise UserError(
            f"budget rule {rule.name!r} gives {shown}, which add up to {total}: whole "
            f"numbers that add up to {mean} x {count} = {mean * count} do"
        )
    return tuple(parts.simplest(map(int, sizes)) for sizes in each)
