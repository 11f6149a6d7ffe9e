"""Writes the page of `device_day.py`: the machine and a table per part."""

import pathlib
from collections.abc import Mapping
from typing import Any

from device_parts import Part
from device_sizes import Row

from kvjax.evaluation import files
from kvjax.evaluation.report.grids import Table, markdown

Line = dict[str, Any]  # of device.jsonl: part, step, and rows or absent


def write_page(
    folder: pathlib.Path,
    machine: Row,
    every: list[Part],
    lines: Mapping[int, Mapping[str, Line]],
) -> None:
    """Writes `folder`/device.md from lines by the part's number and the step's name."""
    about = {key: value for key, value in machine.items() if value is not None}
    blocks = [
        f"# {machine['device']}",
        "Made by `experiments/device/device_day.py`. Large models have random weights.",
        _table([{"": key, "value": value} for key, value in about.items()]),
    ]
    for number, part in enumerate(every, 1):
        blocks.append(f"## {number}. {part.title}")
        blocks += _blocks(part, lines.get(number, {}))
    with files.written(folder / "device.md") as partial:
        partial.write_text("\n\n".join(blocks) + "\n")


def status(part: Part, lines: Mapping[str, Line]) -> str:
    """Returns the status of a part: done, absent, failed, or left if steps remain.

    Args:
      part: the part.
      lines: of the steps that ran, by name.
    """
    found = [lines[name] for name in part.steps if name in lines]
    if any(_errors(line) for line in found):
        return "failed"
    if len(found) < len(part.steps):
        return "left"
    return "absent" if all("absent" in line for line in found) else "done"


def _blocks(part: Part, lines: Mapping[str, Line]) -> list[str]:
    """Returns a part's table, and a list of absent, failed and remaining steps."""
    found = {name: lines[name] for name in part.steps if name in lines}
    rows = [row for line in found.values() for row in line.get("rows", ())]
    cells = [{k: v for k, v in row.items() if k != "error"} for row in rows]
    cells = [row for row in cells if row]
    notes = []
    for name, line in found.items():
        notes += [f"- {name}: absent, {line['absent']}"] if "absent" in line else []
        notes += [f"- {name}: **failed**, {error}" for error in _errors(line)]
    left = [name for name in part.steps if name not in found]
    notes += [f"- not run yet: {'; '.join(left)}"] if left else []
    return [*([_table(cells)] if cells else []), *(["\n".join(notes)] if notes else [])]


def _errors(line: Line) -> list[str]:
    return [row["error"] for row in line.get("rows", ()) if "error" in row]


def _table(rows: list[Row]) -> str:
    head = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(key)) for key in head] for row in rows]
    return markdown(Table(head, cells))


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value)) or "-"
    return "-" if value is None else str(value)
