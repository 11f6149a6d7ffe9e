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
    """Every head keeps the share that it needed on the calibration's texts.

    This is what a share such as `budget="25%"` does where a calibration of the model's
    weights is known. The first 4 and the newest 16 pairs are part of these shares, and
    heads that keep little rest on them: without a `floor`, the policy pins these pairs,
    and `floor` and `even` are chosen for the policy and the schedule. With a `floor`
    the rule is its sizes alone: pin these pairs by `policies.protect(policy, 4, 16)`.

    Compiling takes the longer the more sizes there are, so they are multiples of a
    large number.

    Args:
      length: tokens of the prompts to come: the mean over it is the ratio, and no head
        keeps more. None is what `make_spec` is told.
      path: of a calibration, see `calibrations.Calibration.save`, or the calibration
        itself; None is the one that is known for the model's weights: the user's own,
        which `kvjax.calibrate` leaves, or the package's.
      floor: pairs that every head keeps, or the mean if that is less. None is as many
        as the policy's pinned pairs and the schedule's evictions need; where the mean
        is less, all heads keep alike.
      multiple: of which sizes are multiples, see `calibrations.Calibration.sizes`; None
        is the largest power of two up to half of the mean, 8 at least.
      among, even: what shares out pairs, and how far all keep alike, see
        `calibrations.Calibration.sizes`. `even=None` is `Policy.even` where `floor` is
        None too, and 0 elsewhere.
      target: which of the calibrations that are known: by `repetition`, by `attention`,
        or by `loss`, whose sizes go with `policies.retrieval_heads`
        (`kvjax.training.fit_heads`); `even` of 0.15 finds more of what stood somewhere,
        0 predicts best. None is any but `loss`.

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
    """Every layer keeps the mean, and its heads share that out by what they needed.

    Ada-KV lets the pairs of a layer's heads compete for the layer's places, prompt by
    prompt. Here the heads' shares come from a calibration's texts, so that a head's
    size is known before the prompt, and what it does not keep is not allocated.

    Args:
      length, path, floor, multiple: see `calibrated`.
      even: the part that all heads have alike, Ada-KV's safeguard; 0.2 in kvpress.

    Source: Ada-KV (Feng et al. 2024), arXiv 2407.11550.

    Raises:
      UserError: see `calibrated`.
    """
    return _rule("ada", length, path, floor, multiple, "heads of each layer", even)


def _rule(name, length, path, floor, multiple, among, even, target=None) -> BudgetRule:
    """The rule of checked options."""
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
    """One rule for one set of options: another one would be compiled anew."""

    made = functools.partial(_made, name, multiple=multiple, among=among, target=target)

    def allocate(spec, mean):
        found = calibrations.of_model(spec, path, target)
        step = multiple or max(1 << (max(mean // 2, 1).bit_length() - 1), 8)
        least = min(floor or calibrations.FLOOR, mean)
        how = {"length": length, "floor": least, "multiple": step}
        return found.sizes(spec, mean, **how, among=among, even=even or 0.0).tolist()

    def of_length(length):
        return made(length=length, path=path, floor=floor, even=even)

    def of_policy(policy, schedule, mean):
        least = _least(policy, schedule)
        if mean < least:  # too few to share out
            return None
        part = policy.even if even is None else even
        return made(length=length, path=path, floor=least, even=part)

    return BudgetRule(
        name,
        allocate,
        of_length=of_length if length is None else None,
        of_policy=of_policy if floor is None else None,
        pinned=(calibrations.SINKS, calibrations.NEWEST) if floor is None else (0, 0),
    )


def _least(policy: policies.Policy, schedule: Schedule) -> int:
    """The fewest pairs of a head under which policy and schedule can work."""
    for size in itertools.count(calibrations.FLOOR, _MORE):
        evict = schedule.of_budget(size).evict_size * schedule.evicts_again
        if size >= max(policy.num_pinned + evict + _MORE, 2 * evict):
            return size
