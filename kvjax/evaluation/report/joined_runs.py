"""Record files read, and their records put together where they may be compared.

Quality is compared among records of one model on one device; throughput, among those
that also share the memory limit and the prompts. A task counts as another one if its
prompts' length or number, the answer's length or the seed differ.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.evaluation.report import cells
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
    torn: bool


class Row(NamedTuple):
    """A method at a budget, whatever its task; `budget` as tables call it."""

    label: str
    schedule: str
    budget: str


class Column(NamedTuple):
    """A task as it was asked."""

    task: str
    prompt_tokens: int | None
    new_tokens: int | None
    examples: int | None
    seed: int | None


class Found(NamedTuple):
    """What a method reached on a task: the task's scores, the record, its source."""

    task: dict
    record: Record
    source: Source


@dataclasses.dataclass(frozen=True)
class Quality:
    """Records of one model on one device that tell a quality.

    Attributes:
      rows: the full cache first, then budgets falling.
      columns: each task's name in tables, one of its own.
      found: what there is; not every method need have run every task.
    """

    model: str
    device: str
    sources: list[Source]
    rows: list[Row]
    columns: dict[Column, str]
    found: dict[tuple[Row, Column], Found]

    @property
    def full(self) -> Row | None:
        """The row of the full cache."""
        rows = {row: f.record for (row, _), f in self.found.items()}
        return next((r for r in self.rows if _is_full(rows[r])), None)

    def score(self, row: Row | None, column: Column) -> float | None:
        """The task's headline metric, between 0 and 1; None if unknown."""
        found = self.found.get((row, column))
        return None if found is None else cells.finite(found.task["score"])

    def difference(self, row: Row) -> tuple[float | None, int]:
        """Mean difference to the full cache's scores, and of how many tasks it is."""
        pairs = [(self.score(row, c), self.score(self.full, c)) for c in self.columns]
        known = [one - full for one, full in pairs if None not in (one, full)]
        return (float(np.mean(known)) if known else None), len(known)

    def best(self, row: Row, column: Column) -> bool:
        """Whether some other method at this budget is worse, and none is better.

        By as many digits as tables show.
        """
        peers = [r for r in self.rows if r.budget == row.budget]
        scores = {r: self.score(r, column) for r in peers}
        known = {r: round(s, 3) for r, s in scores.items() if s is not None}
        best = max(known.values(), default=None)
        return len(set(known.values())) > 1 and known.get(row) == best


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Throughput records that share model, device, memory limit and prompts."""

    model: str
    device: str
    memory_bytes: int | None
    prompt_tokens: int | None
    sources: list[Source]
    records: list[Record]


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
        known = isinstance(record, dict) and "method" in record
        if not known or record.keys().isdisjoint(("kind", "accuracy")):
            raise UserError(
                f"{path}, line {number} is no record of a finished method: name a "
                "run's records.jsonl"
            )
    return Source(os.path.normpath(path), records, is_torn(path))


def quality_groups(sources: Iterable[Source]) -> list[Quality]:
    """Groups of what tells a quality, by model and device.

    Raises:
      UserError: two files have the same method's answers to the same task.
    """
    groups: dict[tuple[str, str], list[tuple[Source, Record]]] = {}
    for source in sources:
        for record in source.records:
            if record.get("kind") != "throughput":
                key = cells.text(record.get("model")), cells.text(record.get("device"))
                groups.setdefault(key, []).append((source, record))
    return [_quality(*key, members) for key, members in groups.items()]


def _quality(model: str, device: str, members: list[tuple[Source, Record]]) -> Quality:
    found: dict[tuple[Row, Column], Found] = {}
    for source, record in members:
        for name, task in _tasks(record).items():
            place = _row(source, record), _column(name, task, record)
            if place in found:
                raise UserError(
                    f"{record['method']} on {name} is in both "
                    f"{found[place].source.path} and {source.path}: name one of them"
                )
            found[place] = Found(task, record, source)
    columns = list(dict.fromkeys(column for _, column in found))
    names = dict(zip(columns, _names(columns), strict=True))
    sources = list({s.path: s for s, _ in members}.values())
    return Quality(model, device, sources, _sorted(found), names, found)


def _tasks(record: Record) -> dict[str, dict]:
    """A record without tasks is one of pass keys in prose."""
    bare = {"metric": "accuracy", "score": record.get("accuracy")}
    return record.get("tasks") or {
        "needle": bare | {"examples": record.get("examples")}
    }


def _row(source: Source, record: Record) -> Row:
    row = _plain_row(record)
    twins = [r for r in source.records if _plain_row(r) == row]
    if len(twins) == 1:
        return row
    return row._replace(label=record["method"])  # a run's methods differ in name


def _plain_row(record: Record) -> Row:
    """Of a method called `label, budget, schedule`, what the parts say."""
    label, schedule = cells.label(record), cells.schedule(record)
    of_label, comma, rest = cells.text(record.get("method")).partition(f"{label}, ")
    named = rest.split(", ") if comma and not of_label else []
    named = [part for part in named if part != schedule]
    slots = cells.slots(record)
    budget = ", ".join(named) if named and named != [slots.replace(",", "")] else slots
    return Row(label, schedule, "all" if _is_full(record) else budget)


def _is_full(record: Record) -> bool:
    return record.get("budget", ...) is None


def _column(name: str, task: dict, record: Record) -> Column:
    prompt = task.get("most_prompt_tokens", record.get("prompt_tokens"))
    asked = prompt, task.get("max_new_tokens", record.get("max_new_tokens"))
    return Column(name, *asked, task.get("examples"), record.get("seed"))


def _names(columns: Sequence[Column]) -> list[str]:
    """The task, and what sets it apart from others of its name."""
    names = []
    for column in columns:
        peers = [c for c in columns if c.task == column.task]
        parts = [
            form.format(value)
            for form, value, *values in zip(
                ("{:,}", "{:,} new", "{} prompts", "seed {}"),
                column[1:],
                *(peer[1:] for peer in peers),
                strict=True,
            )
            if len(set(values)) > 1 and value is not None
        ]
        names.append(" ".join([column.task, ", ".join(parts)]).strip())
    return names


def _sorted(found: dict[tuple[Row, Column], Found]) -> list[Row]:
    """The full cache first, then large budgets before small ones."""
    budgets: dict[str, list[float]] = {}
    for (row, _), each in found.items():
        full = _is_full(each.record)
        mean = np.inf if full else np.mean(each.record.get("budget", 0))
        budgets.setdefault(row.budget, []).append(float(mean))
    means = {budget: np.mean(values) for budget, values in budgets.items()}
    rows = dict.fromkeys(row for row, _ in found)
    return sorted(rows, key=lambda row: -means[row.budget])


def throughput_groups(sources: Iterable[Source]) -> list[Throughput]:
    """Groups of throughput records, sources and records in the order given.

    Other engines' records count as of our model and device where a file has both: the
    same weights and machine, by other names.

    Raises:
      UserError: two files have the same method's throughput.
    """
    groups: dict[tuple, list[tuple[Source, Record]]] = {}
    for source in sources:
        members = [r for r in source.records if r.get("kind") == "throughput"]
        ours = [r for r in members if r.get("engine", "kvjax") == "kvjax"]
        for record in members:
            named = record if record in ours or not ours else ours[0]
            key = (
                cells.text(named.get("model")),
                cells.text(named.get("device")),
                record.get("memory_bytes"),
                record.get("prompt_tokens"),
            )
            groups.setdefault(key, []).append((source, record))
    return [_throughput(key, members) for key, members in groups.items()]


def _throughput(key: tuple, members: list[tuple[Source, Record]]) -> Throughput:
    seen: dict[tuple, Source] = {}
    for source, record in members:
        place = record["method"], record.get("new_tokens")
        if place in seen:
            raise UserError(
                f"{place[0]} with {place[1]} new tokens is in both {seen[place].path} "
                f"and {source.path}: name one of them"
            )
        seen[place] = source
    sources = list({s.path: s for s, _ in members}.values())
    return Throughput(*key, sources, [record for _, record in members])
