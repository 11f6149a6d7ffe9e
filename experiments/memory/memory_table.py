"""The form of the tables of `memory_arithmetic.py`, and their Markdown."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvjax.evaluation import arithmetic, roofline
from kvjax.evaluation.report.grids import Table, markdown
from kvjax.types import ModelSpec

Rows = list[dict[str, Any]]
Columns = dict[str, Callable[[dict[str, Any]], str]]


class Asked(NamedTuple):
    """The checked flags of the command."""

    specs: Sequence[ModelSpec]
    name: str  # of the device
    device: roofline.Device
    tokens: int
    batches: Sequence[int]
    longest: int
    seed: int
    link: arithmetic.Link
    budget: int
    dtype: str


class Part(NamedTuple):
    """A table and the notes below it.

    Attributes:
      title: above the table.
      rows: as in the JSON line.
      columns: by heading, the function that formats a row's cell.
      notes: paragraphs.
    """

    title: str
    rows: Rows
    columns: Columns
    notes: Sequence[str] = ()


def as_text(part: Part) -> str:
    """Returns a table with title and notes in Markdown."""
    cells = [[form(row) for form in part.columns.values()] for row in part.rows]
    table = markdown(Table(list(part.columns), cells))
    return "\n\n".join([f"## {part.title}", table, *part.notes])
