"""Finds and stores calibration files: the user's and those that come with kvjax."""

import functools
import os
import pathlib
from typing import Any

from kvjax.cache.calibrations.calibration import Calibration
from kvjax.folders import cache_dir
from kvjax.messages import warn
from kvjax.types import ModelSpec, UserError

LOSS = "loss"  # the target of sizes fitted by `kvjax.training.fit_heads`
TARGETS = "repetition", "attention", LOSS
Given = Calibration | str | os.PathLike | None
_CACHE = pathlib.Path(__file__).parents[1]
_SHIPPED = {"repetition": _CACHE / "calibrated", LOSS: _CACHE / "fitted"}  # by target


def of_model(
    spec: ModelSpec, source: Given = None, target: str | None = None
) -> Calibration:
    """Returns the calibration of a model's weights.

    Args:
      spec: the model's.
      source: a calibration or the path of one; None uses `find`.
      target: see `find`.

    Raises:
      UserError: a file that cannot be read, or that belongs to another model or other
        weights; no calibration is known.
    """
    if source is None:
        found = find(spec, target)
        if found is None:
            raise UserError(
                f"no calibration {f'by {target} ' if target else ''}of the weights of "
                f"{spec.name} is known: make it once with kvjax.calibrate(model)"
            )
        return found
    found = source if isinstance(source, Calibration) else Calibration.load(source)
    found.check(spec)
    return found


def find(spec: ModelSpec, target: str | None = None) -> Calibration | None:
    """Returns the known calibration of these weights, None if there is none.

    Searches the user's folder, the newest file first, then the package's files. Files
    that cannot be read are skipped with a warning.

    Args:
      spec: the model's, see `Calibration.fits`.
      target: one of `TARGETS`; None is any except `loss`, whose sizes are fitted to one
        policy.
    """
    changed = lambda path: path.stat().st_mtime_ns
    own = sorted(own_folder().glob("*.json"), key=changed, reverse=True)
    package = (path for at in _SHIPPED.values() for path in sorted(at.glob("*.json")))
    for path in (*own, *package):
        try:
            found = _loaded(path, changed(path))
        except UserError as error:
            warn(f"{error}, or delete it")
            continue
        has_target = found.target == target if target else found.target != LOSS
        if has_target and found.fits(spec):
            return found
    return None


@functools.lru_cache(maxsize=256)
def _loaded(path: pathlib.Path, changed: int) -> Calibration:
    return Calibration.load(path)


def own_folder() -> pathlib.Path:
    """Returns the user's folder: `calibrations` in the cache folder ($KVJAX_CACHE)."""
    return cache_dir() / "calibrations"


def kept_path(found: Calibration) -> pathlib.Path:
    """Returns the file that `keep` writes: one for each model, weights and target."""
    name = f"{found.model[:64]}-{found.target}-{found.fingerprint}.json"
    return own_folder() / name


def keep(found: Calibration) -> None:
    """Saves a calibration in the user's folder, where `find` searches first.

    Raises:
      UserError: the folder cannot be written.
    """
    path = kept_path(found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{path.parent} cannot be made: {error.strerror}; name another folder by "
            "KVJAX_CACHE"
        ) from None
    found.save(path)


def shipped(name: str, target: str = "repetition") -> Calibration:
    """Returns the package's calibration for a model of this name.

    Raises:
      UserError: there is none.
    """
    folder = _SHIPPED.get(checked_target(target))
    if folder is None or not (path := folder / f"{name}.json").is_file():
        raise UserError(
            f"no calibration of {name!r} by {target} comes with kvjax: make one with "
            "kvjax.calibrate(model)"
        )
    return Calibration.load(path)


def checked_target(target: Any) -> str:
    """Returns `target`; UserError unless it is one of `TARGETS`."""
    if target not in TARGETS:
        raise UserError(f"target is {target!r:.80}: use one of {TARGETS}")
    return target
