"""Registries of factories by name, for configs and callers.

A name is a registered one, or `module:function` for a user's own function, which is
imported from the Python path or the folder that the process was started in.
"""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvjax.types import UserError


class Named(NamedTuple):
    """A registered name and the options of its factory, as pairs; hashable."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        """Returns the call as reports print it: `int4(group=16)`."""
        options = ", ".join(f"{key}={value!s}" for key, value in self.options)
        return f"{self.name}({options})" if options else self.name


def named(what: str, value: Any) -> Any:
    """Returns a `Named` for a name, or for a dict of a name and options.

    Options that are such dicts become `Named` too, and lists become tuples. Any other
    value is returned as it is.

    Raises:
      UserError: a dict without a name.
    """
    if isinstance(value, str):
        return Named(value)
    if not isinstance(value, Mapping):
        return tuple(value) if isinstance(value, list) else value
    options = dict(value)
    if not isinstance(name := options.pop("name", None), str):
        raise UserError(f"{what} {dict(value)} has no name: give one")
    return Named(name, option_pairs(what, options))


def option_pairs(what: str, options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns options as sorted pairs, see `named`."""
    return tuple(
        (key, value if isinstance(value, str) else named(f"{what}: {key}", value))
        for key, value in sorted(options.items())
    )


def make(factory: Callable[..., Any], value: Any) -> Any:
    """Calls `factory(name, **options)` for a `Named`, `factory(value)` for the rest.

    Options that are `Named` are made first, by the same factory.
    """
    if not isinstance(value, Named):
        return factory(value)
    options = {
        key: make(factory, option) if isinstance(option, Named) else option
        for key, option in value.options
    }
    return factory(value.name, **options)


class Registry:
    """A table of factories by name.

    Attributes:
      kind: name of the products in error messages: "policy", "codec".
      product: their type, which users' own factories have to return as well.
    """

    def __init__(self, kind: str, product: type = object):
        self.kind, self.product = kind, product
        self._factories: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, factory: Callable[..., Any]) -> Callable[..., Any]:
        """Registers a factory, called as `factory(**options)`, and returns it.

        Raises:
          UserError: the name is empty, has a colon, or is another factory's.
        """
        if not name or ":" in name:
            raise UserError(
                f"{self.kind} {name!r} cannot be registered: give it a name without a "
                "colon, which is for module:function"
            )
        if self._factories.setdefault(name, factory) is not factory:
            raise UserError(
                f"{self.kind} {name!r} cannot be registered: the name is taken, use "
                "another"
            )
        return factory

    def names(self) -> tuple[str, ...]:
        """Returns the registered names, in alphabetical order."""
        return tuple(sorted(self._factories))

    def factory(self, name: str) -> Callable[..., Any]:
        """Returns the factory of this name.

        Raises:
          UserError: an unknown name, or a `module:function` that cannot be imported.
        """
        if not isinstance(name, str):
            raise UserError(
                f"{self.kind} is {name!r:.80}: give a name, one of "
                f"{', '.join(self.names())}, or module:function of your own"
            )
        if ":" in name:
            return _imported(f"{self.kind} {name!r}", name)
        if name not in self._factories:
            close = difflib.get_close_matches(name, self.names(), 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(
                f"{self.kind} {name!r} is unknown: {hint}use one of "
                f"{', '.join(self.names())}, or module:function of your own"
            )
        return self._factories[name]

    def make(self, name: str, **options: Any) -> Any:
        """Returns the product of the named factory, e.g. `make("streaming", sinks=8)`.

        Raises:
          UserError: an unknown name, options that the factory does not take, or a
            factory that returns another type.
        """
        factory = self.factory(name)
        try:
            signature = inspect.signature(factory)
        except (TypeError, ValueError) as error:  # some builtins have none
            raise UserError(f"{self.kind} {name!r}: {error}") from None
        bound(f"{self.kind} {name!r}", signature, **options)
        made = factory(**options)
        if not isinstance(made, self.product):
            raise UserError(
                f"{self.kind} {name!r} makes a {type(made).__name__}: its function has "
                f"to return a {self.product.__name__}"
            )
        return made


def bound(
    what: str, signature: inspect.Signature, /, *args: Any, **options: Any
) -> inspect.BoundArguments:
    """Returns the arguments bound to a factory's signature.

    Raises:
      UserError: the factory does not take them; the message lists those that it takes
        and begins with `what`.
    """
    try:
        return signature.bind(*args, **options)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values())) or "no options"
        raise UserError(f"{what}: {error}; it takes {takes}") from None


def _imported(where: str, name: str) -> Callable[..., Any]:
    """Imports and returns the function that `module:function` names."""
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise UserError(f"{where} is not a name: write it as module:function")
    importlib.invalidate_caches()  # the file may have been written after the start
    added = "" not in sys.path  # the folder that the process was started in
    if added:
        sys.path.append("")
    try:
        found = importlib.import_module(module)
    except (ImportError, SyntaxError) as error:
        raise UserError(f"{where} cannot be imported: {error}") from error
    finally:
        if added:
            sys.path.remove("")
    factory = getattr(found, function, None)
    if not callable(factory):
        raise UserError(f"{where}: module {module} has no function {function!r}")
    return factory
