"""Turns a user's budget into the number of slots of every head, and checks it.

A budget is a number, a share of the prompt, or sizes per layer or head.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax import policies
from kvjax.cache import budgets, calibrations, head_groups
from kvjax.cache.calibrations.apportion import proportional
from kvjax.cache.schedule import Schedule
from kvjax.messages import warn
from kvjax.types import ModelSpec, UserError, whole_number

_GIVE = (
    "give pairs per head as one int, or for every layer one int or one per head, or a "
    "share of the prompt such as '25%'"
)


def of_layers(
    spec: ModelSpec,
    policy: policies.Policy,
    schedule: Schedule,
    *,
    budget: int | str | Sequence[int | Sequence[int]],
    rule: budgets.BudgetRule | calibrations.Calibration | None,
    pinned: tuple[int, int] | None,
    length: int | None,
) -> tuple[policies.Policy, budgets.BudgetRule, tuple[head_groups.Sizes, ...]]:
    """Returns the policy with its pinned pairs, the budget rule, and the first sizes.

    Args:
      spec: the model's shape.
      policy: with the pairs that `pinned` names.
      schedule: when pairs are evicted.
      budget, rule, pinned: as in `CacheConfig`, the rule made.
      length: tokens of the longest prompt, where they are known.

    Raises:
      UserError: sizes that are no whole numbers, or not one per layer or head; a budget
        rule given together with explicit sizes; a rule that needs the whole prompt
        under a schedule that evicts while reading.
    """
    if isinstance(budget, str):
        asked, budget = budget, share_of(spec, budget, length)
        rule = rule or by_heads(spec, policy, asked)
    if not isinstance(budget, int | np.integer) or isinstance(budget, bool):
        sizes = _explicit(spec, budget, rule)
        return policy, budgets.explicit(sizes), sizes
    budget = int(budget)
    if isinstance(rule, calibrations.Calibration):
        rule = budgets.calibrated(path=rule)
    rule = budgets.for_prompts(rule or budgets.make("uniform"), length)
    if rule.of_policy:
        held = policies.protect(policy, *rule.pinned) if pinned is None else policy
        fitted = rule.of_policy(held, schedule, budget)
        policy, rule = (held, fitted) if fitted else (policy, budgets.uniform())
    if rule.reallocate and schedule.evicts_in_prefill:
        raise UserError(
            f"budget rule {rule.name!r} changes sizes once the prompt is in, where "
            f"the schedule {schedule.phases!r} no longer has all its pairs: use "
            "'after_prefill' or 'decode_only'"
        )
    return policy, rule, budgets.allocated(rule, spec, budget)


def _explicit(spec: ModelSpec, budget: Any, rule: Any) -> tuple[head_groups.Sizes, ...]:
    """Returns the sizes that a user gives for every layer, checked."""
    if not np.iterable(budget):
        raise UserError(f"budget is {budget!r}: {_GIVE}")
    sizes = tuple(_layer_sizes(spec, each) for each in budget)
    if rule is not None:
        raise UserError(
            f"budget {sizes} says every layer's size already: give one int for "
            "the budget rule to share out, or no rule"
        )
    if len(sizes) != spec.num_layers:
        raise UserError(
            f"{len(sizes)} budgets for the {spec.num_layers} layers of {spec.name}: "
            "give one int, or one per layer"
        )
    return sizes


def share(budget: str) -> float:
    """Returns the share that a budget such as "25%" names, above 0 and at most 1.

    Raises:
      UserError: the text is no such share.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", budget.strip())
    part = float(found[1]) / 100 if found else 0.0
    if not 0 < part <= 1:
        raise UserError(f"budget is {budget!r}: {_GIVE}")
    return part


def share_of(spec: ModelSpec, budget: str, length: int | None) -> int:
    """Returns mean pairs per head: a share of what the full cache would keep.

    The full cache keeps a whole prompt, or the window of a layer that has one.

    Raises:
      UserError: the text is no share, or the length is unknown.
    """
    part = share(budget)
    if length is None:
        raise UserError(
            f"budget {budget!r} is a share of a prompt whose length is not known here: "
            "say it by `length`, or give pairs per head"
        )
    windows = map(spec.sliding_window, range(spec.num_layers))
    seen = np.mean([min(window or length, length) for window in windows])
    return max(round(part * seen), 1)


def within_windows(
    spec: ModelSpec, sizes: tuple[head_groups.Sizes, ...], block: int, most: float
) -> tuple[head_groups.Sizes, ...]:
    """Returns the sizes, cut to what layers with a sliding window can use.

    That is the window and one block, since pairs that left the window are dropped only
    after a block was written. The pairs cut off are given to the heads of the other
    layers, in proportion to their sizes, until each has `most`.

    Args:
      spec: the model's shape.
      sizes: pairs per head.
      block: tokens that are written at a time.
      most: the most pairs of a head; 0 gives the pairs cut off to nobody.
    """
    windows = np.array(list(map(spec.sliding_window, range(spec.num_layers))))[:, None]
    asked = np.array(
        [head_groups.sizes_per_head(each, spec.num_kv_heads) for each in sizes]
    )
    found = np.where(windows > 0, np.minimum(asked, windows + block), asked)
    left = int(np.sum(asked - found))
    if not left:
        return sizes
    whole = np.broadcast_to(windows == 0, found.shape)
    if most and whole.any():
        weights = found[whole].astype(float)
        total = weights.sum() + left
        most = min(max(most, weights.max()), total)
        shared = proportional(weights, min(total, most * weights.size), 0, most)
        found[whole] = np.floor(shared + 1e-6)
    return tuple(map(head_groups.simplify, found.tolist()))


def by_heads(
    spec: ModelSpec, policy: policies.Policy, budget: str
) -> budgets.BudgetRule:
    """Returns the rule of a share: calibrated per head where a calibration is known."""
    windows = any(spec.sliding_windows)
    same_share = budgets.proportional() if windows else budgets.uniform()
    if policy.needs_all_heads:
        return same_share
    if calibrations.find(spec):
        return budgets.calibrated()
    warn(
        f"budget {budget!r} keeps the same share in every head, as no calibration of "
        f"the weights of {spec.name} is known. Heads that keep what they need find "
        "more: kvjax.calibrate(model) measures it once, and the same budget takes it "
        f"from then on; budget_rule={same_share.name!r} says that this is meant",
    )
    return same_share


def _layer_sizes(spec: ModelSpec, given: int | Sequence[int]) -> head_groups.Sizes:
    """Returns the checked sizes of one layer."""
    if isinstance(given, str) or not np.iterable(given):
        return whole_number("budget", given)
    sizes = [whole_number("budget", size) for size in given]
    if len(sizes) != spec.num_kv_heads:
        raise UserError(
            f"a layer's budget has {len(sizes)} sizes for the {spec.num_kv_heads} KV "
            f"heads of {spec.name}: give one int, or one per head"
        )
    return head_groups.simplify(sizes)


def check_budget(budget: int, policy: policies.Policy, schedule: Schedule) -> None:
    """Raises UserError if the policy cannot work under so small a budget.

    Warns where an eviction leaves less than half of it.
    """
    if budget < 1:
        raise UserError(f"budget {budget}: a head must keep at least 1 pair")
    schedule = schedule.of_budget(budget)
    chunk, evict = schedule.prefill_chunk, schedule.evict_size
    if schedule.evicts_in_prefill and evict < chunk:
        raise UserError(
            f"schedule evict_size={evict} makes no room for a chunk of {chunk} tokens: "
            "raise evict_size, or lower prefill_chunk"
        )
    least = budget - evict if schedule.evicts_again else budget
    if least < 1:
        raise UserError(
            f"budget {budget} must be larger than the {evict} pairs that one eviction "
            "drops: raise the budget, or lower the schedule's prefill_chunk and "
            "evict_size"
        )
    if policy.num_pinned and policy.num_pinned >= least:
        raise UserError(
            f"policy {policy.name!r} pins {policy.num_pinned} pairs, but an eviction "
            f"at budget {budget} leaves {least}: raise the budget or pin fewer"
        )
    if 2 * least < budget:
        warn(
            f"an eviction leaves {least} of the {budget} pairs of the budget: raise "
            "the budget, or lower the schedule's prefill_chunk and evict_size to "
            f"{budget // 2} or less",
        )
