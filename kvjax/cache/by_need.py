"""Budget rules that share out pairs by what heads needed on a calibration's texts."""

import functools
import os

from kvjax.cache import budgets, calibrations
from kvjax.types import UserError, real_number, whole_number


def calibrated(
    length: int | None = None,
    path: str | None = None,
    floor: int = calibrations.FLOOR,
    multiple: int | None = None,
    among: str = "heads",
    even: float = 0.0,
    target: str = "repetition",
) -> budgets.BudgetRule:
    """Every head keeps the share that it needed on the calibration's texts.

    Sinks and newest pairs are part of these shares (`calibrations.SINKS`, `NEWEST`),
    and heads that keep little rest on them: use a rule that keeps them, as in
    `policies.protect(rule, 4, 16)`. Compiling takes the longer the more sizes there
    are, so they are multiples of a large number.

    Args:
      length: tokens of the prompts to come: the mean over it is the ratio, and no head
        keeps more. None is what `make_config` is told.
      path: of a calibration, see `calibrations.Calibration.save`; None is the one that
        comes with the package for the model.
      floor: pairs that every head keeps, or the mean if that is less.
      multiple: of which sizes are multiples, see `calibrations.Calibration.sizes`; None
        is the largest power of two up to half of the mean, 8 at least.
      among, even: what shares out pairs, and how far all keep alike, see
        `calibrations.Calibration.sizes`.
      target: which of the package's calibrations: by `repetition`, or by `loss`, whose
        sizes go with `policies.retrieval_heads` (`kvjax.training.fit_heads`); `even` of
        0.15 finds more of what stood somewhere, 0 predicts best.

    Raises:
      UserError: an option out of range; from `allocate`, a file or a model that does
        not fit, a mean above the length.
    """
    return _rule("calibrated", length, path, floor, multiple, among, even, target)


def ada(
    length: int | None = None,
    path: str | None = None,
    floor: int = calibrations.FLOOR,
    multiple: int | None = None,
    even: float = 0.0,
) -> budgets.BudgetRule:
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


def _rule(
    name, length, path, floor, multiple, among, even, target="repetition"
) -> budgets.BudgetRule:
    """The rule of checked options."""
    if not isinstance(path, str | os.PathLike | None):
        raise UserError(f"{name}(path) is {path!r}: give a calibration's file")
    if path is not None and target != "repetition":
        raise UserError(f"{name}(target={target!r}) is of no file: give path or target")
    if length is not None:
        length = whole_number(f"{name}(length)", length, 1)
    if multiple is not None:
        multiple = whole_number(f"{name}(multiple)", multiple, 1)
    return _made(
        name,
        length,
        path,
        whole_number(f"{name}(floor)", floor, 1),
        multiple,
        calibrations.checked_among(among),
        real_number(f"{name}(even)", even, 0, 1),
        calibrations.checked_target(target),
    )


@functools.cache
def _made(
    name, length, path, floor, multiple, among, even, target
) -> budgets.BudgetRule:
    """One rule for one set of options: another one would be compiled anew."""

    def allocate(spec, mean):
        found = calibrations.of_model(spec.name, path, target)
        step = multiple or max(1 << (max(mean // 2, 1).bit_length() - 1), 8)
        how = {"length": length, "floor": min(floor, mean), "multiple": step}
        return found.sizes(spec, mean, **how, among=among, even=even).tolist()

    def of_length(length):
        return _made(name, length, path, floor, multiple, among, even, target)

    asks = of_length if length is None else None
    return budgets.BudgetRule(name, allocate, of_length=asks)


budgets.register("calibrated", calibrated)
budgets.register("ada", ada)
