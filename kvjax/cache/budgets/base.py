"""The interface of budget rules, and the checks of the sizes that they return.

::

    allocate            sizes before prefill
      |   measure       during prefill, in every layer (optional)
      v
    reallocate          sizes after prefill, from what was measured (optional)

Sizes are integers whose mean is the budget, so a rule moves memory between layers and
heads, and takes no more of it.
"""

import numbers
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from kvjax.cache import head_groups
from kvjax.cache.schedule import Schedule
from kvjax.policies import Policy
from kvjax.types import ModelSpec, UserError


class BudgetRule(NamedTuple):
    """What shares out pairs; `measure` and `reallocate` come together or not at all.

    Attributes:
      name: for reports.
      allocate: (spec, mean) -> sizes before the prompt is read: for every layer one, or
        one for each of its heads.
      measure: (before, after), the residual stream [B, T, M] before and after a layer's
        attention -> f32[B, T], a number for every token. Pure, in the program that
        reads; what is asked of `reallocate` is the mean over a prompt's tokens.
      reallocate: (measured float64[L], the mean over the prompts of a batch; mean) ->
        sizes, on the host. Few different ones: every set of sizes is a program.
      smallest: (mean) -> the smallest size that `reallocate` may give, so that what
        does not fit the policy is told before a prompt is read; None where that is not
        known.
      of_length: (tokens of the prompts to come) -> the rule that knows it; None where
        it does not matter, or was told before.
      of_policy: (policy, schedule, mean) -> the rule for that policy, or None where
        the mean is too small to be shared out; None where the policy does not matter.
      pinned: how many of the first and newest pairs these sizes rely on. The policy
        pins them unless the user says how many it pins (`CacheConfig.pinned`).
    """

    name: str
    allocate: Callable[[ModelSpec, int], Sequence[int | Sequence[int]]]
    measure: Callable[[Array, Array], Float[Array, "B T"]] | None = None
    reallocate: Callable[[np.ndarray, int], Sequence[int]] | None = None
    smallest: Callable[[int], int] | None = None
    of_length: Callable[[int], "BudgetRule"] | None = None
    of_policy: Callable[[Policy, Schedule, int], "BudgetRule | None"] | None = None
    pinned: tuple[int, int] = (0, 0)

    def __repr__(self) -> str:
        return f"BudgetRule({self.name!r})"


def for_prompts(rule: BudgetRule, length: int | None) -> BudgetRule:
    """The rule, told how many tokens prompts have if it asks.

    Raises:
      UserError: it asks, and nobody knows.
    """
    if rule.of_length is None:
        return rule
    if length is None:
        raise UserError(
            f"budget rule {rule.name!r} depends on the length of prompts, which is not "
            "known here: give the rule its length, as in length=1000"
        )
    return rule.of_length(length)


def check_least(rule: str, least: int, mean: int) -> None:
    """Raises UserError where no layer can keep so much and all of them the mean."""
    if least > mean:
        raise UserError(
            f"budget rule {rule!r} keeps at least {least} pairs in every layer, above "
            f"the budget {mean}: raise the budget, or lower what is kept at least"
        )


def largest_remainders(shares: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers next to the shares with the same sum, which is a whole number.

    Those that lost most to rounding down get one more, the first of equals.
    """
    below = np.floor(shares).astype(int)
    order = np.argsort(below - shares, kind="stable")
    below[order[: round(float(np.sum(shares))) - below.sum()]] += 1
    return tuple(below.tolist())


def allocated(
    rule: BudgetRule, spec: ModelSpec, mean: int
) -> tuple[head_groups.Sizes, ...]:
    """The sizes that a rule begins with, checked."""
    heads = spec.num_kv_heads
    return _checked(rule, rule.allocate(spec, mean), spec.num_layers, heads, mean)


def reallocated(
    rule: BudgetRule, measured: np.ndarray, mean: int
) -> tuple[head_groups.Sizes, ...]:
    """The sizes that follow from what was measured, checked."""
    return _checked(rule, rule.reallocate(measured, mean), len(measured), 1, mean)


def possible(rule: BudgetRule, sizes: Sequence[head_groups.Sizes]) -> set[int]:
    """The sizes that a head may come to have, as far as they are known beforehand."""
    found = head_groups.distinct_sizes(sizes)
    if rule.smallest is None:
        return found
    return found | {rule.smallest(round(np.mean([np.mean(size) for size in sizes])))}


def _checked(
    rule: BudgetRule, given: Sequence, layers: int, heads: int, mean: int
) -> tuple[head_groups.Sizes, ...]:
    """Raises UserError unless the sizes are ints that add up."""
    if isinstance(given, str) or not np.iterable(given):
        raise UserError(
            f"budget rule {rule.name!r} gives {given!r:.80}: it has to give a size for "
            "every layer"
        )
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
    real = all(isinstance(size, numbers.Real) for size in flat)
    whole = real and all(float(size).is_integer() for size in flat)
    if not whole or sum(flat) != mean * count:
        total = f", which add up to {sum(flat)}" if real else ""
        raise UserError(
            f"budget rule {rule.name!r} gives {tuple(given)}{total}: whole numbers "
            f"that add up to {mean} x {count} = {mean * count} do"
        )
    return tuple(head_groups.simplify(map(int, sizes)) for sizes in each)
