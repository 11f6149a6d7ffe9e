"""Markdown tables of one run's records, whose columns line up in a terminal.

Records are a *sweep* if two labels or more come with several budgets or schedules.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from kvjax.evaluation.report import cells, grids
from kvjax.evaluation.report.cells import label, number, rate, schedule, slots
from kvjax.evaluation.report.records import Record

Columns = dict[str, Callable[[Record], str]]
_LEFT = ("Method", "Engine", "Schedule", "Batch (limited by)")


def is_sweep(records: Sequence[Record]) -> bool:
    """Whether two labels or more come with several budgets or schedules."""
    found: dict[str, set] = {}
    for record in records:
        found.setdefault(label(record), set()).add(setting_of(record))
    return sum(len(settings) > 1 for settings in found.values()) > 1


def _row_labels(records: Sequence[Record]) -> list[str]:
    """First cells of a table: in a sweep, columns tell budget and schedule."""
    return (
        [label(r) for r in records] if is_sweep(records) else cells.labels_of(records)
    )


def _sweep_columns(
    records: Sequence[Record],
) -> Columns:
    return {"Schedule": schedule, "KV slots": slots} if is_sweep(records) else {}


def setting_of(record: Record) -> tuple[str, str]:
    return schedule(record), slots(record)


def settings_of(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Schedules and budgets of a sweep, the full cache's left out, budgets rising."""
    found = {
        setting_of(r): _mean_budget(r) for r in records if r.get("budget") is not None
    }
    phases = list(dict.fromkeys(each for each, _ in found))
    return sorted(found, key=lambda each: (phases.index(each[0]), found[each]))


def _mean_budget(record: Record) -> float:
    return float(np.mean(record["budget"]))


def _rank(record: Record) -> tuple[float, float]:
    """Smaller is better: what the score lacks, then KL; unknown is worst."""
    accuracy, kl = cells.finite(record.get("accuracy")), cells.finite(record.get("kl"))
    return (
        math.inf if accuracy is None else -accuracy,
        math.inf if kl is None else kl,
    )


# --- tables ---------------------------------------------------------------------------


def table(records: Sequence[Record]) -> str:
    """Returns the results as a Markdown table whose columns line up in a terminal."""
    full = cells.full_cache(records)
    columns: Columns = {
        "Schedule": schedule,
        "KV slots": slots,
        "Batch (limited by)": cells.batch,
        cells.quality_of(records).column: lambda r: number(r.get("accuracy")),
        "KL": lambda r: cells.kl(r.get("kl")),
        "Top-1": lambda r: number(r.get("top1_agreement")),
        "Prefill tok/s": lambda r: rate(r.get("prefill_tokens_per_s")),
        "Decode tok/s": lambda r: rate(r.get("decode_tokens_per_s")),
        "End-to-end tok/s": lambda r: end_to_end(r, full),
        "KV MB/prompt": lambda r: cells.megabytes(r.get("kv_bytes_per_row")),
    }
    return markdown(records, columns)


def end_to_end(record: Record, full: Record) -> str:
    times = cells.ratio(record, full, "tokens_per_s")
    shown = "" if times is None else f" ({times:.2f}x)"
    return rate(record.get("tokens_per_s")) + shown


def best_table(records: Sequence[Record]) -> str:
    """The full cache, and the best method of each column of a sweep.

    The best has the highest score (the most needles found) and, among those that share
    it, the smallest KL.
    """
    full = cells.full_cache(records)
    best, equals = [full] if full else [], {}
    for setting in settings_of(records):
        peers = [r for r in records if setting_of(r) == setting]
        best.append(min(peers, key=_rank))
        found = best[-1].get("accuracy")
        equals[id(best[-1])] = sum(r.get("accuracy") == found for r in peers) - 1
    columns: Columns = {
        "Schedule": schedule,
        "KV slots": slots,
        cells.quality_of(records).column: lambda r: number(r.get("accuracy")),
        "As many": lambda r: cells.text(equals.get(id(r))),
        "KL": lambda r: cells.kl(r.get("kl")),
        "Top-1": lambda r: number(r.get("top1_agreement")),
        "Decode tok/s": lambda r: rate(r.get("decode_tokens_per_s")),
        "KV MB/prompt": lambda r: cells.megabytes(r.get("kv_bytes_per_row")),
        "decoding": lambda r: cells.megabytes(r.get("kv_bytes_decode")),
    }
    return markdown(best, columns, [label(r) for r in best])


def memory_table(records: Sequence[Record]) -> str:
    """Bytes as planned and measured, losses, time."""
    columns: Columns = {
        **_sweep_columns(records),
        "KV MB live / allocated": cells.live,
        "Planned MB": lambda r: cells.megabytes(r.get("planned_bytes")),
        "Measured MB": lambda r: cells.megabytes(r.get("measured_bytes")),
        "Limit MB": lambda r: cells.megabytes(r.get("memory_bytes")),
        "Loss": lambda r: number(r.get("loss"), "{:.3f}"),
        "Loss of full cache": lambda r: number(r.get("reference_loss"), "{:.3f}"),
        "Seconds": lambda r: rate(r.get("seconds")),
        "Seed": lambda r: cells.text(r.get("seed")),
    }
    return markdown(records, columns)


def markdown(records: Sequence[Record], columns: Columns, labels=None) -> str:
    """`grid` in Markdown."""
    return grids.markdown(grid(records, columns, labels))


def grid(
    records: Sequence[Record], columns: Columns, labels: Sequence[str] | None = None
) -> grids.Grid:
    """One row per record, the label first; text to the left, numbers to the right."""
    head = ["Method", *columns]
    rows = [
        [label, *(cell(record) for cell in columns.values())]
        for label, record in zip(labels or _row_labels(records), records, strict=True)
    ]
    left = frozenset(i for i, name in enumerate(head) if name in _LEFT)
    return grids.Grid(head, rows, left)
