"""The report of one run's records; `kvjax.evaluation.report.pictures` draws them.

`kvjax.evaluation.report.records` says what a record holds. A report of a sweep (see `kvjax.evaluation.report.tables`)
begins with the best method per budget and schedule, and draws a heat map and the Pareto
front.
"""

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.evaluation.report import (
    cells,
    pictures,
    sweep_pictures,
    tables,
    throughput_pictures,
    throughput_report,
)
from kvjax.evaluation.report.records import Record
from kvjax.evaluation.report.throughput_report import is_throughput

_SUMMARY = (
    "policy",
    "schedule",
    "budget",
    "batch",
    "accuracy",
    "kl",
    "top1_agreement",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "tokens_per_s",
    "kv_bytes_per_row",
)


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Returns each method's numbers, also relative to the full cache.

    {"full_cache": label or None, "methods": {label: {..., "speedup", "kv_ratio"}}}:
    `speedup` is end-to-end tokens/s over the full cache's, `kv_ratio` the same for KV
    bytes per prompt. What is unknown is None, and so is what JSON cannot hold.
    """
    full = cells.full_cache(records)
    methods = {
        label: {
            **{key: cells.finite(record.get(key)) for key in _SUMMARY},
            "speedup": cells.ratio(record, full, "tokens_per_s"),
            "kv_ratio": cells.ratio(record, full, "kv_bytes_per_row"),
        }
        for label, record in zip(cells.labels_of(records), records, strict=True)
    }
    labels = (label for label, r in zip(methods, records, strict=True) if r is full)
    return {"full_cache": next(labels, None), "methods": methods}


def overview(records: Sequence[Record]) -> str:
    """Returns the table that fits on a screen: of a sweep, the best methods."""
    if is_throughput(records):
        return throughput_report.table(records)
    make = tables.best_table if tables.is_sweep(records) else tables.table
    return make(records)


_READING = """\
- **KV slots** is the most key-value pairs a KV head keeps (|kv|); the full cache keeps
  all of them. **Batch** is how many prompts ran at a time, and what kept it from more.
- **{quality}** is {meaning}{examples}.
- **KL** is KL(full cache || method) in nats per token and **Top-1** the share of tokens
  where both find the same next token likeliest, both on a text given token by token.
  Where it is an axis, a KL of 0 (below 0.0001) has its place under the dotted line.
- **End-to-end** is generated tokens by total time, prefill included; in brackets, how
  many times the full cache.
- **KV MB/prompt** is the most KV cache one prompt takes at any time, 1 MB being 10^6
  bytes. A method that compresses once the prompt is in takes the whole
  prompt's.{points}
- A dash stands for what was not measured."""


_POINTS = """
  The pictures show this memory; points that would cover each other stand side by
  side."""

_READING_SWEEP = """\
- The first table has the best method of each schedule and budget: the highest score,
  then the smallest KL. **As many** is how many others have the same score;
  **decoding**, the KV cache per prompt once the prompt is in.
- In the heat map methods are sorted by their mean score, then by KL; brighter is better
  in both panels, and a dash stands for what was not measured.
- The Pareto pictures have a column per schedule, since one that compresses after the
  prompt saves memory only from then on. A method on the line has the best quality that
  its memory, statistics included, or less can buy."""

_MEMORY_NOTE = """\
**KV MB live / allocated** are the keys and values of one prompt at the end: those of
the pairs kept, and of all slots. A rule that keeps fewer pairs than the budget in some
heads (fastgen, simlayerkv, scissorhands_released, a narrow sliding window) leaves slots
empty and frees nothing that is allocated: quality at a smaller live size is not memory
saved."""


def write_report(records: Sequence[Record], workdir: str | os.PathLike) -> pathlib.Path:
    """Writes report.md and its pictures.

    They are heat_map.png and pareto.png for a sweep, throughput_vs_batch.png for
    throughput, and otherwise quality_vs_memory.png and throughput_vs_memory.png.

    Args:
      records: what to show, in this order.
      workdir: an existing folder.

    Returns:
      The path of report.md.

    Raises:
      ValueError: there are no records.
    """
    if not records:
        raise ValueError("there are no records to report")
    workdir = pathlib.Path(workdir)
    _draw(records, workdir)
    path = workdir / "report.md"
    path.write_text(_report(records), encoding="utf-8")
    return path


def _draw(records: Sequence[Record], workdir: pathlib.Path) -> None:
    full = cells.full_cache(records)
    if is_throughput(records):
        throughput_pictures.draw(records, workdir / "throughput_vs_batch.png")
    elif tables.is_sweep(records):
        columns = [tables.setting_of(r) for r in records]
        rows, settings = [cells.label(r) for r in records], tables.settings_of(records)
        sweep_pictures.draw(records, rows, columns, settings, full, workdir)
    else:
        pictures.draw(records, cells.labels_of(records), full, workdir)


def _report(records: Sequence[Record]) -> str:
    if is_throughput(records):
        return _throughput_report(records)
    examples = [r["examples"] for r in records if r.get("examples")]
    among = f"; of {min(examples)} prompts, one counts {1 / min(examples):.2f}"
    sweep, quality = tables.is_sweep(records), cells.quality_of(records)
    parts = [
        "# KV-cache compression: quality, speed and memory",
        _setting(records),
        *(_sweep_parts(records) if sweep else _parts(records)),
        "## How to read it",
        _READING.format(
            quality=quality.column,
            meaning=quality.meaning,
            examples=among if examples else "",
            points="" if sweep else _POINTS,
        ),
        *([_READING_SWEEP] if sweep else []),
        "## Memory, loss and time",
        _MEMORY_NOTE,
        tables.memory_table(records),
        "## Versions",
        cells.versions(records) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _throughput_report(records: Sequence[Record]) -> str:
    parts = [
        "# Throughput at one memory limit",
        _setting(records),
        throughput_report.table(records),
        "![Throughput against batch](throughput_vs_batch.png)",
        "## How to read it",
        throughput_report.READING,
        "## Versions",
        cells.versions(records) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _parts(records: Sequence[Record]) -> list[str]:
    return [
        tables.table(records),
        "![Quality against KV memory](quality_vs_memory.png)",
        "![Throughput against KV memory](throughput_vs_memory.png)",
    ]


def _sweep_parts(records: Sequence[Record]) -> list[str]:
    title = cells.quality_of(records).title
    return [
        "## The best of each schedule and budget",
        tables.best_table(records),
        f"![{title} and KL of every method](heat_map.png)",
        "![Quality against KV memory, and the best for each](pareto.png)",
        "## All methods",
        tables.table(records),
    ]


def _setting(records: Sequence[Record]) -> str:
    """One sentence: model, device, memory limit, sizes."""

    def known(key: str, form: Callable[[Any], str] = str) -> str:
        values = dict.fromkeys(form(r[key]) for r in records if r.get(key) is not None)
        return " / ".join(values) or "unknown"

    return (
        f"Model {known('model')} on {known('device')} with a memory limit of "
        f"{known('memory_bytes', cells.megabytes)} MB; prompts of "
        f"{known('prompt_tokens', _count)} tokens, each followed by at most "
        f"{known('max_new_tokens', _count)} new ones."
    )


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
