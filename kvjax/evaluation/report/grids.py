"""A table of text, as Markdown and as LaTeX."""

from collections.abc import Sequence
from typing import NamedTuple

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "$": r"\$",
        "&": r"\&",
        "#": r"\#",
        "%": r"\%",
        "_": r"\_",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "Δ": r"$\Delta$",
    }
)


class Grid(NamedTuple):
    """A table.

    Attributes:
      head: names of the columns.
      rows: cells, as many in each row as there are columns.
      left: the columns that are set flush left; numbers are set flush right.
      bold: places (row, column) of what stands out.
      breaks: rows before which LaTeX draws a rule.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: frozenset[int] = frozenset({0})
    bold: frozenset[tuple[int, int]] = frozenset()
    breaks: frozenset[int] = frozenset()


def markdown(grid: Grid) -> str:
    """The table in Markdown, its columns lined up for a terminal."""
    rows = [
        [_marked(cell, (i, j) in grid.bold) for j, cell in enumerate(row)]
        for i, row in enumerate(grid.rows)
    ]
    lines = [[cell.replace("|", "\\|") for cell in row] for row in [grid.head, *rows]]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = [
        "-" * width if column in grid.left else "-" * (width - 1) + ":"
        for column, width in enumerate(widths)
    ]
    return "\n".join(
        "| " + " | ".join(_padded(row, widths, grid.left)) + " |"
        for row in (lines[0], rule, *lines[1:])
    )


def _marked(cell: str, bold: bool) -> str:
    return f"**{cell}**" if bold else cell


def _padded(row: Sequence[str], widths: Sequence[int], left: frozenset[int]):
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.ljust(width) if column in left else cell.rjust(width)


def latex(grid: Grid, caption: str) -> str:
    """The table in LaTeX, for a document that loads booktabs."""
    columns = "".join("l" if j in grid.left else "r" for j in range(len(grid.head)))
    lines = []
    for i, row in enumerate(grid.rows):
        cells = [_bold(escaped(c), (i, j) in grid.bold) for j, c in enumerate(row)]
        lines += [r"    \midrule"] if i in grid.breaks else []
        lines.append("    " + " & ".join(cells) + r" \\")
    head = " & ".join(map(escaped, grid.head))
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{escaped(caption)}}}",
            rf"  \begin{{tabular}}{{{columns}}}",
            r"    \toprule",
            rf"    {head} \\",
            r"    \midrule",
            *lines,
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
        ]
    )


def escaped(text: str) -> str:
    """Text with LaTeX's special signs written so that they print as they are."""
    return text.translate(_LATEX)


def _bold(cell: str, bold: bool) -> str:
    return rf"\textbf{{{cell}}}" if bold else cell
