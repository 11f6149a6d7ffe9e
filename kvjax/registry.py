"""Names that configs and callers may use for what the package, or its user, has made.

A name is one that was registered, or `module:function` of the user's own, which is
imported from the Python path or the folder that the process was started in.
"""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from kvjax.types import UserError


class Registry:
    """Factories by name.

    Attributes:
      kind: what is made, for error messages: "policy", "codec".
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._factories: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, factory: Callable[..., Any]) -> Callable[..., Any]:
        """Lets `name` stand for what `factory(**options)` makes; returns the factory.

        Raises:
          UserError: the name is taken, by another factory, or holds a colon.
        """
        if ":" in name or self._factories.get(name, factory) is not factory:
            raise UserError(
                f"{self.kind} {name!r} cannot be registered: the name is taken, or "
                "holds a colon, which is for module:function"
            )
        self._factories[name] = factory
        return factory

    def names(self) -> tuple[str, ...]:
        """The registered names, in alphabetical order."""
        return tuple(sorted(self._factories))

    def factory(self, name: str) -> Callable[..., Any]:
        """The factory of this name.

        Raises:
          UserError: an unknown name, or a `module:function` that cannot be imported.
        """
        if ":" in name:
            return _imported(self.kind, name)
        if name not in self._factories:
            close = difflib.get_close_matches(name, self.names(), 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(
                f"{self.kind} {name!r} is unknown: {hint}use one of "
                f"{', '.join(self.names())}, or module:function of your own"
            )
        return self._factories[name]

    def make(self, name: str, **options: Any) -> Any:
        """What the factory of this name makes.

        Raises:
          UserError: an unknown name, or options that the factory does not take.
        """
        factory = self.factory(name)
        try:
            inspect.signature(factory).bind(**options)
        except TypeError as error:
            raise UserError(f"{self.kind} {name!r}: {error}") from None
        return factory(**options)


def _imported(kind: str, name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    where = f"{kind} {name!r}"
    sys.path.append("")  # the folder that the process was started in
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{where} cannot be imported: {error}") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{where}: {error}; write it as module:function") from None
    finally:
        sys.path.remove("")
    factory = getattr(found, function, None)
    if not callable(factory):
        raise UserError(f"{where}: {found.__name__} has no function {function!r}")
    return factory
