"""What annotations say of arrays, checked at every call while the tests run."""

import typing
from collections.abc import Callable

import beartype
import jaxtyping


def check(function: Callable) -> Callable:
    """beartype, for those of a function's annotations that speak of arrays.

    The others are the type checker's: what a user may get wrong has a UserError, which
    tests ask for with the wrong types. Fields of dataclasses are let alone, because JAX
    builds pytrees of anything: shapes, specs, None.
    """
    if function.__name__ == "__init__":
        return function
    hints = function.__annotations__
    function.__annotations__ = {n: hint for n, hint in hints.items() if _array(hint)}
    return beartype.beartype(function) if function.__annotations__ else function


def _array(hint: object) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_array, typing.get_args(hint)))
