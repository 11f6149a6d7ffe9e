"""What one cell of a table says: names, numbers and units of records."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.evaluation.report.records import Record

_NEEDLES = {"needle", "passkey"}  # tasks whose score is the share of pass keys found


class Quality(NamedTuple):
    """What records' `accuracy` is called.

    Attributes:
      column: in tables.
      title: of a picture.
      axis: what the picture's axis shows.
      meaning: a clause for "how to read it".
    """

    column: str
    title: str
    axis: str
    meaning: str


def quality_of(records: Iterable[Record]) -> Quality:
    """The share of needles found, one task's metric, or the mean of several."""
    metrics = {
        name: task["metric"] for r in records for name, task in _tasks(r).items()
    }
    if metrics.keys() <= _NEEDLES:
        found = "the share of prompts whose hidden pass key was found"
        return Quality(
            "Needle", "Needle accuracy", "accuracy (share of prompts)", found
        )
    told = [f"{name} ({metric})" for name, metric in metrics.items()]
    if len(told) == 1:
        return Quality("Score", told[0], f"{told[0]}, mean over prompts", told[0])
    what = f"the mean over tasks: {', '.join(told)}"
    return Quality("Score", f"Mean of {len(told)} tasks", "score", what)


def _tasks(record: Record) -> dict[str, Any]:
    return record.get("tasks") or {}


def full_cache(records: Iterable[Record]) -> Record:
    """The record of the full cache, or an empty one."""
    return next((r for r in records if r.get("budget", ...) is None), {})


def ratio(record: Record, full: Record, key: str) -> float | None:
    value, base = finite(record.get(key)), finite(full.get(key))
    return None if value is None or not base else value / base


def finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def labels_of(records: Sequence[Record]) -> list[str]:
    """A name of its own for each record: the method, and what sets it apart."""
    methods = [str(r.get("method", "-")) for r in records]
    names = []
    for record, method in zip(records, methods, strict=True):
        peers = [r for r, m in zip(records, methods, strict=True) if m == method]
        parts = [
            form(record)
            for form in (_policy, schedule, slots, _new)
            if len({form(peer) for peer in peers}) > 1
        ]
        names.append(f"{method} ({', '.join(parts)})" if parts else method)
    return [_numbered(names, i) for i in range(len(names))]


def _numbered(names: Sequence[str], index: int) -> str:
    before = names[:index].count(names[index])
    return f"{names[index]} #{before + 1}" if before else names[index]


def _policy(record: Record) -> str:
    return text(record.get("policy"))


def schedule(record: Record) -> str:
    return text(record.get("schedule"))


def _new(record: Record) -> str:
    new = record.get("new_tokens")
    return "-" if new is None else f"{new} new"


def text(value: Any) -> str:
    return "-" if value is None else str(value)


def versions(records: Iterable[Record]) -> str:
    """Names and versions of the software that made records."""
    found = {
        f"{name} {version}"
        for record in records
        for name, version in (record.get("versions") or {}).items()
    }
    return ", ".join(sorted(found)) or "versions not recorded"


def slots(record: Record) -> str:
    budget = record.get("budget", ...)
    if budget is ...:
        return "-"
    if budget is None:
        return "all"
    if isinstance(budget, int | np.integer):
        return f"{budget:,}"
    least, most = min(budget), max(budget)
    if least == most:
        return f"{most:,}"
    return f"{least:,}-{most:,} (mean {sum(budget) / len(budget):,.0f})"


def number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)


def rate(value: float | None) -> str:
    """Three significant digits, and no fraction from 100 on."""
    if value is None or not math.isfinite(value):
        return number(value)
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f}"


def megabytes(value: float | None) -> str:
    return "-" if value is None else rate(value / 1e6)


def kl(value: float | None) -> str:
    return "<0.001" if value and 0 < value < 0.001 else number(value, "{:.3f}")


def batch(record: Record) -> str:
    limit = record.get("batch_limit")
    return text(record.get("batch")) + (f" ({limit})" if limit else "")


def live(record: Record) -> str:
    """Bytes of a prompt's pairs, and of the slots that they lie in."""
    live, allocated = record.get("kv_bytes_live"), record.get("kv_bytes_allocated")
    return "-" if live is None else f"{megabytes(live)} / {megabytes(allocated)}"


def label(record: Record) -> str:
    return text(record.get("label") or record.get("method"))
