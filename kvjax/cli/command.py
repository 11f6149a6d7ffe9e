"""Ends every command alike: a mistake is one line and exit code 2, Ctrl-C is 130.

Workers of `experiments/baselines` import this module under an interpreter that has
absl, but neither kvjax's dependencies nor JAX: keep it free of them.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags

Parse = Callable[[list[str]], list[str]]


class _FlagError(Exception):
    """Flags that do not parse; one line."""


def run(
    main: Callable[[list[str]], Any],
    parse: Parse = flags.FLAGS,
    interrupted: str = "interrupted",
    mistakes: tuple[type[Exception], ...] = (),
) -> None:
    """Calls `app.run`; shows no traceback for what is no fault of the program.

    Args:
      main: receives the positional arguments, the name of the command first.
      parse: parses the flags of a command line; returns the positional arguments.
      interrupted: the line that answers Ctrl-C.
      mistakes: exceptions whose message is for the user, besides `kvjax.UserError`.
    """
    with contextlib.suppress(BrokenPipeError):  # the reader of a pipe has left
        try:
            app.run(main, flags_parser=lambda argv: _parsed(parse, argv))
        except (_FlagError, *mistakes, *_user_errors()) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print(f"\n{interrupted}", file=sys.stderr, flush=True)
            os._exit(130)  # JAX's threads may be at work: do not end Python under them


def parser(module: str, pages: Callable[[list[str]], str] = lambda argv: "") -> Parse:
    """Returns a flag parser that answers --help with the docstring of a module.

    Args:
      module: name of the imported module that defines the flags.
      pages: returns what --help prints after the flags.
    """

    def parse(argv: list[str]) -> list[str]:
        if {"--help", "-help", "-h"} & set(argv):
            # The second are flags of the script that was started, if it adds any.
            shown = flags.FLAGS.module_help(module), flags.FLAGS.main_module_help()
            print(sys.modules[module].__doc__, "flags:", *shown, pages(argv), sep="\n")
            sys.exit(0)
        return flags.FLAGS(argv)

    return parse


def _parsed(parse: Parse, argv: list[str]) -> list[str]:
    try:
        return parse(argv)
    except flags.Error as error:
        raise _FlagError(f"flags: {str(error).splitlines()[0]}") from None


def _user_errors() -> tuple[type[Exception], ...]:
    """Returns `kvjax.UserError` if it was imported; only then it can be raised."""
    types = sys.modules.get("kvjax.types")
    return (types.UserError,) if types else ()
