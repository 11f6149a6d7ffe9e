"""The files of records that reports of several runs are made from."""

import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from kvjax.evaluation.report.records import Record, is_torn, read_records
from kvjax.types import UserError


class Source(NamedTuple):
    """A file of records.

    Attributes:
      path: as reports name it.
      records: all of them.
      torn: whether its last line was cut short, and left out.
    """

    path: str
    records: list[Record]
    torn: bool = False


def read(paths: Sequence[str | os.PathLike]) -> list[Source]:
    """The files, each once: of a folder its records.jsonl, or else all its *.jsonl.

    Raises:
      UserError: no records, or a file that is none of records.
    """
    if not paths:
        raise UserError("no runs named: give their folders or records.jsonl files")
    files = {f.resolve(): f for path in paths for f in _files(pathlib.Path(path))}
    return [_source(path) for path in files.values()]


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} is not there: name a run's folder or its records")
    if (path / "records.jsonl").is_file():
        return [path / "records.jsonl"]
    found = sorted(f for f in path.glob("*.jsonl") if f.name != "batches.jsonl")
    if not found:
        raise UserError(
            f"{path} holds no records.jsonl: no method has finished there, or it is no "
            "run's folder"
        )
    return found


def _source(path: pathlib.Path) -> Source:
    records = read_records(path)
    if not records:
        raise UserError(f"{path} holds no records: no method has finished there")
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not {"method", "experiment"} <= set(record):
            raise UserError(
                f"{path}, line {number} is no record of a finished method: name a "
                "run's records.jsonl"
            )
    return Source(os.path.normpath(path), records, is_torn(path))
