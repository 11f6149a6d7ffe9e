"""Budget rules with sizes per head, as measured by a calibration."""

import functools
import itertools
import os

from kvjax import policies
from kvjax.cache import calibrations
from kvjax.cache.budgets.base import BudgetRule
from kvjax.cache.schedule import Schedule
from kvjax.types import UserError, real_number, whole_number

_MORE = 8  # pairs that every head keeps beyond the pinned ones


def calibrated(
    length: int | None = None,
    path: calibrations.Given = None,
    floor: int | None = None,
    multiple: int | None = None,
    among: str = "heads",
    even: float | None = None,
    target: str | None = None,
) -> BudgetRule:
    """Gives every head the share of pairs that it needed on the calibration's texts.

    A share such as `budget="25%"` uses this rule if a calibration of the model's
    weights is known. The shares include the first 4 and the newest 16 pairs, and small
    heads rely on them: without `floor`, the policy pins these pairs, and `floor` and
    `even` are chosen for the policy and the schedule. With `floor`, the rule gives its
    sizes only: pin these pairs by `policies.protect(policy, 4, 16)`.

    Sizes are multiples of a large number, because more distinct sizes compile longer.

    Args:
      length: tokens of the longest prompt. The ratio is the mean over it, and no head
        keeps more. None is the `length` of `make_spec`.
      path: of a calibration, see `calibrations.Calibration.save`, or the calibration
        itself; None finds the one of the model's weights: the user's own, which
        `kvjax.calibrate` saves, or the package's.
      floor: pairs that every head keeps, or the mean if that is less. None is what the
        policy's pinned pairs and the schedule's evictions need; under a smaller mean,
        sizes are uniform.
      multiple: sizes are multiples of it, see `calibrations.Calibration.sizes`; None is
        the largest power of two up to half of the mean, at least 8.
      among, even: what shares out the pairs, and how far sizes are interpolated towards
        uniform ones, see `calibrations.Calibration.sizes`. `even=None` is `Policy.even`
        if `floor` is None too, and else 0.
      target: of the calibration to find: `repetition`, `attention`, or `loss`, which is
        for `policies.retrieval_heads` (`kvjax.training.fit_heads`); with `loss`,
        `even=0.15` retrieves more and 0 predicts best. None is any but `loss`.

    Raises:
      UserError: an option out of range; from `allocate`, a file or a model that does
        not fit, no calibration of the model's weights, a mean above the length.
    """
    return _rule("calibrated", length, path, floor, multiple, among, even, target)


def ada(
    length: int | None = None,
    path: calibrations.Given = None,
    floor: int | None = None,
    multiple: int | None = None,
    even: float | None = None,
) -> BudgetRule:
    """Gives every layer the mean, shared out among its heads by a calibration.

    Ada-KV lets the pairs of a layer's heads compete for its slots, prompt by prompt.
    Here the shares come from a calibration's texts, so a head's size is known before
    prefill, and only its slots are allocated.

    Args:
      length, path, floor, multiple: see `calibrated`.
      even: the uniform part of every size, Ada-KV's safeguard; 0.2 in kvpress.

    Source: Ada-KV (Feng et al. 2024), arXiv 2407.11550.

    Raises:
      UserError: see `calibrated`.
    """
    return _rule("ada", length, path, floor, multiple, "heads of each layer", even)


def _rule(name, length, path, floor, multiple, among, even, target=None) -> BudgetRule:
    """Checks the options and returns the rule."""
    if not isinstance(path, calibrations.Calibration | str | os.PathLike | None):
        raise UserError(f"{name}(path) is {path!r}: give a calibration's file")
    if path is not None and target is not None:
        raise UserError(f"{name}(target={target!r}) is of no file: give path or target")
    if length is not None:
        length = whole_number(f"{name}(length)", length, 1)
    if floor is not None:
        floor = whole_number(f"{name}(floor)", floor, 1)
    if multiple is not None:
        multiple = whole_number(f"{name}(multiple)", multiple, 1)
    if even is not None:
        even = real_number(f"{name}(even)", even, 0, 1)
    if target is not None:
        target = calibrations.checked_target(target)
    among = calibrations.checked_among(among)
    return _made(name, length, path, floor, multiple, among, even, target)


@functools.cache
def _made(name, length, path, floor, multiple, among, even, target) -> BudgetRule:
    """Returns one object per set of options: another would compile again."""

    made = functools.partial(_made, name, multiple=multiple, among=among, target=target)

    def allocate(spec, mean):
        found = calibrations.of_model(spec, path, target)
        step = multiple or max(1 << (max(mean // 2, 1).bit_length() - 1), 8)
        least = min(floor or calibrations.FLOOR, mean)
        sizes = found.sizes(
            spec,
            mean,
            length=length,
            floor=least,
            multiple=step,
            among=among,
            even=even or 0.0,
        )
        return sizes.tolist()

    def of_length(length):
        return made(length=length, path=path, floor=floor, even=even)

    def of_policy(policy, schedule, mean):
        least = _least(policy, schedule)
        if mean < least:  # too few to share out
            return None
        default = policy.even if even is None else even
        return made(length=length, path=path, floor=least, even=default)

    return BudgetRule(
        name,
        allocate,
        of_length=of_length if length is None else None,
        of_policy=of_policy if floor is None else None,
        pinned=(calibrations.SINKS, calibrations.NEWEST) if floor is None else (0, 0),
    )


def _least(policy: policies.Policy, schedule: Schedule) -> int:
    """Returns the smallest size of a head that fits the policy and the schedule."""
    for size in itertools.count(calibrations.FLOOR, _MORE):
        evict = schedule.of_budget(size).evict_size * schedule.evicts_again
        if size >= max(policy.num_pinned + evict + _MORE, 2 * evict):
            return size
