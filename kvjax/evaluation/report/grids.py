"""Tables of text in Markdown, aligned, and split where they are too wide."""

import itertools
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PAGE = 125  # characters in a line of a page; wider tables come in parts


class Table(NamedTuple):
    """A table of text.

    Attributes:
      head: names of the columns.
      rows: cells, as many in each row as there are columns.
      left: columns that are flush left; the others are flush right.
      bold: cells in bold, as (row, column).
      breaks: rows before which LaTeX draws a rule.
      keys: leading columns that identify a row; every part repeats them.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: frozenset[int] = frozenset({0})
    bold: frozenset[tuple[int, int]] = frozenset()
    breaks: frozenset[int] = frozenset()
    keys: int = 1


def markdown(table: Table, width: int | None = None) -> str:
    """Returns the table in Markdown, its columns aligned.

    A table wider than `width` characters is split into parts, each with the key columns
    and as many others as fit, at least one. None: no limit.
    """
    cells = [
        [f"**{c}**" if (i, j) in table.bold else c for j, c in enumerate(row)]
        for i, row in enumerate(table.rows)
    ]
    columns = []
    for j, column in enumerate(zip(table.head, *cells, strict=True)):
        column = [cell.replace("|", "\\|") for cell in column]
        size, left = max(3, *map(len, column)), j in table.left
        rule = "-" * (size - 1) + ("-" if left else ":")
        lines = [cell.ljust(size) if left else cell.rjust(size) for cell in column]
        columns.append([lines[0], rule, *lines[1:]])
    parts = _parts([len(column[0]) for column in columns], table.keys, width)
    return "\n\n".join(
        "\n".join(
            f"| {' | '.join(line)} |"
            for line in zip(*(columns[j] for j in part), strict=True)
        )
        for part in parts
    )


def _parts(widths: Sequence[int], keys: int, most: int | None) -> list[list[int]]:
    """Returns the columns of each part: as few parts as fit, of similar widths."""
    if most is None:
        return [list(range(len(widths)))]
    parts = list(_filled(widths, keys, most))
    for smaller in range(most - 1, 0, -1):
        found = list(_filled(widths, keys, smaller))
        if len(found) > len(parts):
            break
        parts = found
    return parts


def _filled(widths: Sequence[int], keys: int, most: int) -> Iterator[list[int]]:
    """Yields the columns of each part: the keys, and as many others as fit."""
    start = keys
    while start < len(widths):
        sizes = [size + len(" | ") for size in [*widths[:keys], *widths[start:]]]
        fit = sum(end < most for end in itertools.accumulate(sizes))
        stop = start + max(1, fit - keys)
        yield [*range(keys), *range(start, stop)]
        start = stop


def terminal_width() -> int | None:
    """Returns the characters in a line of the terminal; None if stdout is not one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
