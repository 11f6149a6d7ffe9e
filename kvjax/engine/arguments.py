"""`CacheConfig` and `Sampling` from single fields, as users' functions take them."""

import dataclasses
import difflib
import itertools
from typing import Any

from kvjax.cache.config import CacheConfig
from kvjax.engine.sampling import Sampling
from kvjax.types import UserError

_OBJECTS = (Sampling, CacheConfig)


def asked(
    sampling: Sampling | None, cache: CacheConfig | None, fields: dict[str, Any]
) -> tuple[Sampling, CacheConfig]:
    """Returns both, made from single fields where they are not given themselves.

    Raises:
      UserError: an unknown field, or one beside the object that it belongs to.
    """
    known = {cls: _names(cls) for cls in _OBJECTS}
    _check_names(fields, sorted(set(itertools.chain(*known.values()))), _OBJECTS)
    own = {
        cls: {name: value for name, value in fields.items() if name in known[cls]}
        for cls in _OBJECTS
    }
    return (
        _one_of(Sampling, "sampling", sampling, own[Sampling]),
        _one_of(CacheConfig, "cache", cache, own[CacheConfig]),
    )


def made(cls: type, what: str, whole: Any, fields: dict[str, Any]) -> Any:
    """Returns an object, or makes it from single fields; see `asked`.

    Args:
      cls: `CacheConfig` or `Sampling`.
      what: the name of the argument in error messages.
      whole: the object; None to make it.
      fields: its fields.
    """
    _check_names(fields, _names(cls), (cls,))
    return _one_of(cls, what, whole, fields)


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _check_names(fields: dict[str, Any], known: list[str], classes: tuple) -> None:
    """Raises UserError for a field that no class has."""
    if unknown := sorted(set(fields) - set(known)):
        close = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        owners = " or ".join(f"kvjax.{cls.__name__}" for cls in reversed(classes))
        raise UserError(f"{unknown[0]!r} is unknown: {hint}give fields of {owners}")


def _one_of(cls: type, what: str, whole: Any, fields: dict[str, Any]) -> Any:
    """Returns the object that was given whole, or one made from single fields."""
    if whole is None:
        return cls(**fields)
    if not isinstance(whole, cls):
        raise UserError(f"{what} is {whole!r:.80}: give a kvjax.{cls.__name__}")
    default = cls()
    for name, value in fields.items():
        usual = getattr(default, name)
        if value is not usual and (type(value) is not type(usual) or value != usual):
            raise UserError(
                f"{name}={value!r:.40} beside {what}=: give {name} as a field of the "
                f"kvjax.{cls.__name__}"
            )
    return whole
