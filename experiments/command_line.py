"""How every command ends: a mistake is one line and exit code 2, Ctrl-C one and 130."""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags
from baselines import BaselineError


class _Slip(Exception):
    """Flags that do not parse; one line."""


def run(
    main: Callable[[list[str]], Any],
    parse: Callable[[list[str]], list[str]] = flags.FLAGS,
    interrupted: str = "interrupted",
) -> None:
    """`app.run`, without tracebacks for what is no fault of the program's.

    Args:
      main: is given what the flags leave of the command line.
      parse: reads the flags, and returns what they leave.
      interrupted: what Ctrl-C is answered with.
    """
    with contextlib.suppress(BrokenPipeError):  # whoever read along has seen enough
        try:
            app.run(main, flags_parser=lambda argv: _parsed(parse, argv))
        except _mistakes() as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print(f"\n{interrupted}", file=sys.stderr, flush=True)
            os._exit(130)  # JAX's threads may be at work: do not end Python under them


def _parsed(parse, argv):
    try:
        return parse(argv)
    except flags.Error as error:
        raise _Slip(f"flags: {str(error).splitlines()[0]}") from None


def _mistakes() -> tuple[type[Exception], ...]:
    """Asked for once something is raised: not every worker's interpreter has kvjax."""
    types = sys.modules.get("kvjax.types")
    return (_Slip, BaselineError, *([types.UserError] if types else []))
