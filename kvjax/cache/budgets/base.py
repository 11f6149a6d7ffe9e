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
    """A budget rule: turns a mean budget into sizes per layer or head.

    A rule has both `measure` and `reallocate`, or neither.

    Attributes:
      name: for reports.
      allocate: (spec, mean) -> sizes before prefill: one per layer, or one for each of
        its heads.
      measure: (before, after) -> f32[B, T], one number per token, of the residual
        stream [B, T, M] before and after a layer's attention. Pure; it runs in the
        prefill program.
      reallocate: (measured float64[L], mean) -> sizes, on the host; `measured` is the
        mean over the tokens of all prompts of a batch. It should return few distinct
        sets of sizes, since every set compiles a program.
      smallest: (mean) -> the smallest size that `reallocate` may return, which is
        checked against the policy before prefill; None if it is not known.
      of_length: (tokens of the longest prompt) -> the rule for that length; None if the
        length does not matter, or is known.
      of_policy: (policy, schedule, mean) -> the rule for that policy, or None if the
        mean is too small to share out; None if the policy does not matter.
      pinned: numbers of first and newest pairs that these sizes rely on. The policy
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
    """Returns the rule for prompts of this length.

    Raises:
      UserError: the rule depends on the length, and that is None.
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
    """Raises UserError if the least size of a layer is above the mean."""
    if least > mean:
        raise UserError(
            f"budget rule {rule!r} keeps at least {least} pairs in every layer, above "
            f"the budget {mean}: raise the budget, or lower what is kept at least"
        )


def largest_remainders(shares: Sequence[float]) -> tuple[int, ...]:
    """Rounds shares to integers with the same sum, which must be an integer.

    Shares are rounded down; those with the largest remainders get one more, the first
    of equals.
    """
    below = np.floor(shares).astype(int)
    order = np.argsort(below - shares, kind="stable")
    below[order[: round(float(np.sum(shares))) - below.sum()]] += 1
    return tuple(below.tolist())


def allocated(
    rule: BudgetRule, spec: ModelSpec, mean: int
) -> tuple[head_groups.Sizes, ...]:
    """Returns the sizes that a rule allocates before prefill, checked."""
    heads = spec.num_kv_heads
    return _checked(rule, rule.allocate(spec, mean), spec.num_layers, heads, mean)


def reallocated(
    rule: BudgetRule, measured: np.ndarray, mean: int
) -> tuple[head_groups.Sizes, ...]:
    """Returns the sizes that a rule derives from its measurements, checked."""
    return _checked(rule, rule.reallocate(measured, mean), len(measured), 1, mean)


def possible(rule: BudgetRule, sizes: Sequence[head_groups.Sizes]) -> set[int]:
    """Returns the sizes that a head may get, as far as they are known beforehand."""
    found = head_groups.distinct_sizes(sizes)
    if rule.smallest is None:
        return found
    return found | {rule.smallest(round(np.mean([np.mean(size) for size in sizes])))}


def _checked(
    rule: BudgetRule, sizes: Sequence, layers: int, heads: int, mean: int
) -> tuple[head_groups.Sizes, ...]:
    """Returns the sizes; UserError unless they are ints that add up."""
    if isinstance(sizes, str) or not np.iterable(sizes):
        raise UserError(
            f"budget rule {rule.name!r} gives {sizes!r:.80}: it has to give a size for "
            "every layer"
        )
    if len(sizes) != layers:
        raise UserError(
            f"{len(sizes)} budgets for {layers} layers from the rule {rule.name!r}: "
            "give one per layer"
        )
    if not any(map(np.iterable, sizes)):
        heads = 1  # one size per layer
    layer_sizes = [list(x) if np.iterable(x) else [x] * heads for x in sizes]
    if wrong := [x for x in layer_sizes if len(x) != heads]:
        raise UserError(
            f"budget rule {rule.name!r} gives a layer {len(wrong[0])} sizes for its "
            f"{heads} heads: give one, or one per head"
        )
    flat = [size for x in layer_sizes for size in x]
    count = layers * heads
    real = all(isinstance(size, numbers.Real) for size in flat)
    whole = real and all(float(size).is_integer() for size in flat)
    if not whole or sum(flat) != mean * count:
        total = f", which add up to {sum(flat)}" if real else ""
        raise UserError(
            f"budget rule {rule.name!r} gives {tuple(sizes)}{total}: whole numbers "
            f"that add up to {mean} x {count} = {mean * count} do"
        )
    return tuple(head_groups.simplify(map(int, x)) for x in layer_sizes)
