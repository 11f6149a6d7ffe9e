"""The command `kvjax`: `kvjax run`, `kvjax report` and `kvjax calibrate`.

    run        runs the experiment of a config and reports it
    report     joins runs in one report
    calibrate  measures how many KV pairs each head of a model needs

`kvjax COMMAND --help` lists the command's flags.
"""

# Scripts import `kvjax.cli.command` in environments without JAX, so nothing that needs
# it is imported here before a command is named.
import importlib
import sys

import kvjax

COMMANDS = ("run", "report", "calibrate")


def main() -> None:
    """Runs the command that `sys.argv` names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h", "help"):
        print(__doc__)
    elif name == "--version":
        print(kvjax.__version__)
    elif name in COMMANDS:
        sys.argv[:2] = [f"kvjax {name}"]  # what usage texts and records show
        _imported(name).start()
    else:
        _fail(f"there is no command {name!r}: use one of {', '.join(COMMANDS)}")


def _imported(name: str):
    from kvjax.types import UserError, require_extra

    try:
        require_extra("eval", "ml_collections", "pandas", "matplotlib")
    except UserError as error:
        _fail(str(error))
    return importlib.import_module(f"kvjax.cli.{name}")


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
