"""What every table of `memory_arithmetic.py` is made of, and how it is printed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvjax.evaluation import arithmetic, roofline
from kvjax.evaluation.report.tables import Table, markdown
from kvjax.types import ModelSpec

Rows = list[dict[str, Any]]
Columns = dict[str, Callable[[dict[str, Any]], str]]


class Asked(NamedTuple):
    """The command line, checked."""

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
    """A table and what is to be said below it.

    Attributes:
      title: above the table.
      rows: what JSON has.
      columns: the rows' cells by the head of their column.
      notes: a paragraph each.
    """

    title: str
    rows: Rows
    columns: Columns
    notes: Sequence[str] = ()


def as_text(part: Part) -> str:
    """A part in Markdown."""
    cells = [[form(row) for form in part.columns.values()] for row in part.rows]
    table = markdown(Table(list(part.columns), cells))
    return "\n\n".join([f"## {part.title}", table, *part.notes])
