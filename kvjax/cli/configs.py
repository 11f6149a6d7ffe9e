"""Finds configs: those that come with kvjax by name, others by the path of their file.

`kvjax/configs` is a link to the folder `configs` of the repository; a wheel has the
files themselves in its place. A checkout without links has the folder alone.
"""

import ast
import difflib
import pathlib
import re
from collections.abc import Iterator

from kvjax.types import UserError

_LINK, _BESIDE = (pathlib.Path(__file__).parents[i] / "configs" for i in (1, 2))
FOLDER = _LINK if _LINK.is_dir() else _BESIDE
_FLAG = re.compile(r"(--?config=)([^:]*)(:?.*)", re.DOTALL)


def names() -> list[str]:
    """Returns the names of the configs, such as `batch_max/paper`, in order."""
    files = FOLDER.rglob("*.py")
    return sorted(str(file.relative_to(FOLDER).with_suffix("")) for file in files)


def descriptions() -> Iterator[tuple[str, str]]:
    """Yields the name of every config, and the first line of its docstring."""
    for name in names():
        tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
        yield name, (ast.get_docstring(tree) or "").partition("\n")[0]


def with_path(argument: str) -> str:
    """Returns `--config=NAME[:ARGUMENT]` with the file of that name; others as given.

    Raises:
      UserError: there is no config of the name.
    """
    match = _FLAG.fullmatch(argument)
    if not match or not match[2] or match[2].endswith(".py"):
        return argument
    known = names()
    if match[2] not in known:
        close = difflib.get_close_matches(match[2], known, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(
            f"--config={match[2]}: no config has this name: {hint}use one of "
            f"{', '.join(known)}, or a file FOLDER/NAME.py"
        )
    return f"{match[1]}{FOLDER / match[2]}.py{match[3]}"


def of_arguments(argv: list[str]) -> str | None:
    """Returns the value of --config, before flags are parsed; None without it."""
    found = re.search(r"\0--?config[=\0]([^\0]*)", "\0" + "\0".join(argv))
    return found[1] if found else None
