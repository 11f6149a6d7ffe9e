"""Records of runs to a table and a report; `kvjax.pictures` draws them.

A record is a dict, one per method and one JSON line in a file. What it may hold (a
missing value counts as unknown and shows as "-"):

    method, policy, schedule    names; `method` is what tables and pictures call it
    label                       what methods have in common that differ in budget and
                                schedule only: the name of their row in a sweep
    budget                      slots per KV head: an int, one per layer, or None (all)
    rope                        "true" or "slot": where keys stand
    batch, batch_limit          prompts at a time, and what limits them
    accuracy, examples          share of needles found, among how many
    kl, loss, reference_loss    nats per token
    top1_agreement              share of tokens
    prefill_tokens_per_s, decode_tokens_per_s
    tokens_per_s                end to end: generated tokens by total time
    kv_bytes_per_row            most bytes of KV cache that one prompt takes at any time
    kv_bytes_decode             the same while tokens are generated
    kv_bytes_live, kv_bytes_allocated    of it, bytes of one prompt's keys and values at
                                the end: of the pairs kept, and of all slots
    planned_bytes, measured_bytes, memory_bytes    of the whole run; the last, its limit
    seconds, seed, prompt_tokens, max_new_tokens, model, device, versions
    kind                        "throughput" for those of `kvjax.throughput`, which also
                                say engine, role, group, new_tokens and what the
                                roofline allows; see `throughput_table`

Records are a *sweep* if two labels or more come with several budgets or schedules. A
report of a sweep begins with the best method per budget and schedule, and draws a heat
map and the Pareto front.
"""

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvjax import pictures, sweep_pictures

Record = dict[str, Any]

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


# --- records ------------------------------------------------------------------------


def read_records(path: str | os.PathLike) -> list[Record]:
    """Returns the records of a JSON-lines file; none if there is no such file.

    A last line that an interruption cut short is left out.

    Raises:
      ValueError: another line is not JSON, naming the file and the line.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    lines = lines if _is_torn(last) else [*lines, last]
    return [_parse(path, number, line) for number, line in enumerate(lines, 1) if line]


def append_record(path: str | os.PathLike, record: Record) -> None:
    """Adds one line to a JSON-lines file and has it on disk on return.

    NumPy scalars and arrays become plain numbers. A torn last line is removed first.
    """
    line = json.dumps(record, default=_plain).encode() + b"\n"
    with open(path, "ab+") as file:
        file.seek(0)
        last = file.read().rpartition(b"\n")[2]
        if _is_torn(last):
            file.truncate(file.seek(0, os.SEEK_END) - len(last))
        elif last:
            line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _is_torn(last: bytes) -> bool:
    """Whether what follows the last line break is the beginning of a record only."""
    try:
        return bool(last) and not isinstance(json.loads(last), dict)
    except ValueError:
        return True


def _parse(path: pathlib.Path, number: int, line: bytes) -> Record:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not a JSON record: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a record cannot hold a {type(value).__name__}: {value!r}")


# --- numbers ------------------------------------------------------------------------


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Returns each method's numbers, also relative to the full cache.

    {"full_cache": label or None, "methods": {label: {..., "speedup", "kv_ratio"}}}:
    `speedup` is end-to-end tokens/s over the full cache's, `kv_ratio` the same for KV
    bytes per prompt. What is unknown is None, and so is what JSON cannot hold.
    """
    full = _full(records)
    methods = {
        label: {
            **{key: _finite(record.get(key)) for key in _SUMMARY},
            "speedup": _ratio(record, full, "tokens_per_s"),
            "kv_ratio": _ratio(record, full, "kv_bytes_per_row"),
        }
        for label, record in zip(_labels(records), records, strict=True)
    }
    labels = (label for label, r in zip(methods, records, strict=True) if r is full)
    return {"full_cache": next(labels, None), "methods": methods}


def _full(records: Iterable[Record]) -> Record:
    """The record of the full cache, or an empty one."""
    return next((r for r in records if r.get("budget", ...) is None), {})


def _ratio(record: Record, full: Record, key: str) -> float | None:
    value, base = _finite(record.get(key)), _finite(full.get(key))
    return None if value is None or not base else value / base


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _labels(records: Sequence[Record]) -> list[str]:
    """A name of its own for each record: the method, and what sets it apart."""
    methods = [str(r.get("method", "-")) for r in records]
    names = []
    for record, method in zip(records, methods, strict=True):
        peers = [r for r, m in zip(records, methods, strict=True) if m == method]
        parts = [
            form(record)
            for form in (_policy, _schedule, _slots, _new)
            if len({form(peer) for peer in peers}) > 1
        ]
        names.append(f"{method} ({', '.join(parts)})" if parts else method)
    return [_numbered(names, i) for i in range(len(names))]


def _numbered(names: Sequence[str], index: int) -> str:
    before = names[:index].count(names[index])
    return f"{names[index]} #{before + 1}" if before else names[index]


def _policy(record: Record) -> str:
    return _text(record.get("policy"))


def _schedule(record: Record) -> str:
    return _text(record.get("schedule"))


def _new(record: Record) -> str:
    new = record.get("new_tokens")
    return "-" if new is None else f"{new} new"


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _slots(record: Record) -> str:
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


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)


def _rate(value: float | None) -> str:
    """Three significant digits, and no fraction from 100 on."""
    if value is None or not math.isfinite(value):
        return _number(value)
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f}"


def _megabytes(value: float | None) -> str:
    return "-" if value is None else _rate(value / 1e6)


def _kl(value: float | None) -> str:
    return "<0.001" if value and 0 < value < 0.001 else _number(value, "{:.3f}")


def _batch(record: Record) -> str:
    limit = record.get("batch_limit")
    return _text(record.get("batch")) + (f" ({limit})" if limit else "")


def _live(record: Record) -> str:
    """Bytes of a prompt's pairs, and of the slots that they lie in."""
    live, allocated = record.get("kv_bytes_live"), record.get("kv_bytes_allocated")
    return "-" if live is None else f"{_megabytes(live)} / {_megabytes(allocated)}"


def _end_to_end(record: Record, full: Record) -> str:
    ratio = _ratio(record, full, "tokens_per_s")
    times = "" if ratio is None else f" ({ratio:.2f}x)"
    return _rate(record.get("tokens_per_s")) + times


# --- sweeps -------------------------------------------------------------------------


def is_sweep(records: Sequence[Record]) -> bool:
    """Whether two labels or more come with several budgets or schedules."""
    found: dict[str, set] = {}
    for record in records:
        found.setdefault(_label(record), set()).add(_setting_of(record))
    return sum(len(settings) > 1 for settings in found.values()) > 1


def _label(record: Record) -> str:
    return _text(record.get("label") or record.get("method"))


def _row_labels(records: Sequence[Record]) -> list[str]:
    """First cells of a table: in a sweep, columns tell budget and schedule."""
    return [_label(r) for r in records] if is_sweep(records) else _labels(records)


def _sweep_columns(
    records: Sequence[Record],
) -> dict[str, Callable[[Record], str]]:
    return {"Schedule": _schedule, "KV slots": _slots} if is_sweep(records) else {}


def _setting_of(record: Record) -> tuple[str, str]:
    return _schedule(record), _slots(record)


def _settings(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Schedules and budgets of a sweep, the full cache's left out, budgets rising."""
    found = {
        _setting_of(r): _mean_budget(r) for r in records if r.get("budget") is not None
    }
    phases = list(dict.fromkeys(schedule for schedule, _ in found))
    return sorted(found, key=lambda each: (phases.index(each[0]), found[each]))


def _mean_budget(record: Record) -> float:
    return float(np.mean(record["budget"]))


def _rank(record: Record) -> tuple[float, float]:
    """Smaller is better: the needles missed, then KL; unknown is worst."""
    accuracy, kl = _finite(record.get("accuracy")), _finite(record.get("kl"))
    return (
        math.inf if accuracy is None else -accuracy,
        math.inf if kl is None else kl,
    )


# --- tables -------------------------------------------------------------------------


def table(records: Sequence[Record]) -> str:
    """Returns the results as a Markdown table whose columns line up in a terminal."""
    full = _full(records)
    columns: dict[str, Callable[[Record], str]] = {
        "Schedule": _schedule,
        "KV slots": _slots,
        "Batch (limited by)": _batch,
        "Needle": lambda r: _number(r.get("accuracy")),
        "KL": lambda r: _kl(r.get("kl")),
        "Top-1": lambda r: _number(r.get("top1_agreement")),
        "Prefill tok/s": lambda r: _rate(r.get("prefill_tokens_per_s")),
        "Decode tok/s": lambda r: _rate(r.get("decode_tokens_per_s")),
        "End-to-end tok/s": lambda r: _end_to_end(r, full),
        "KV MB/prompt": lambda r: _megabytes(r.get("kv_bytes_per_row")),
    }
    return _markdown(records, columns)


def overview(records: Sequence[Record]) -> str:
    """Returns the table that fits on a screen: of a sweep, the best methods."""
    if is_throughput(records):
        return throughput_table(records)
    return _best_table(records) if is_sweep(records) else table(records)


def is_throughput(records: Sequence[Record]) -> bool:
    """Whether these are `kvjax.throughput`'s: a table of their own, and no pictures."""
    kinds = {record.get("kind") for record in records}
    return kinds == {"throughput"}


def throughput_table(records: Sequence[Record]) -> str:
    """Returns batches, rates and shares of the roofline, by number of new tokens.

    In brackets, end-to-end rates relative to ED's at as many new tokens.
    """
    eds = {r["new_tokens"]: r for r in records if r.get("role") == "ed"}

    def end_to_end(record):
        return _end_to_end(record, eds.get(record["new_tokens"], {}))

    columns: dict[str, Callable[[Record], str]] = {
        "New": lambda r: _text(r["new_tokens"]),
        "KV slots": _slots,
        "Batch (limited by)": _batch,
        "Read at once": lambda r: _text(r.get("group")),
        "Prefill tok/s": lambda r: _rate(r.get("prefill_tokens_per_s")),
        "of roofline": lambda r: _number(r.get("prefill_roofline")),
        "Decode tok/s": lambda r: _rate(r.get("decode_tokens_per_s")),
        "roofline": lambda r: _number(r.get("decode_roofline")),
        "End-to-end tok/s": end_to_end,
        "Predicted": lambda r: _rate(r.get("predicted_tokens_per_s")),
        "Needle": lambda r: _number(r.get("accuracy")),
        "Planned MB": lambda r: _megabytes(r.get("planned_bytes")),
        "Measured MB": lambda r: _megabytes(r.get("measured_bytes")),
    }
    return _markdown(records, columns, [_text(r.get("method")) for r in records])


def _best_table(records: Sequence[Record]) -> str:
    """The full cache, and the best method of each column of a sweep.

    The best has found the most needles and, among those that found as many, has the
    smallest KL.
    """
    full = _full(records)
    best, equals = [full] if full else [], {}
    for setting in _settings(records):
        peers = [r for r in records if _setting_of(r) == setting]
        best.append(min(peers, key=_rank))
        found = best[-1].get("accuracy")
        equals[id(best[-1])] = sum(r.get("accuracy") == found for r in peers) - 1
    columns: dict[str, Callable[[Record], str]] = {
        "Schedule": _schedule,
        "KV slots": _slots,
        "Needle": lambda r: _number(r.get("accuracy")),
        "As many": lambda r: _text(equals.get(id(r))),
        "KL": lambda r: _kl(r.get("kl")),
        "Top-1": lambda r: _number(r.get("top1_agreement")),
        "Decode tok/s": lambda r: _rate(r.get("decode_tokens_per_s")),
        "KV MB/prompt": lambda r: _megabytes(r.get("kv_bytes_per_row")),
        "decoding": lambda r: _megabytes(r.get("kv_bytes_decode")),
    }
    return _markdown(best, columns, [_label(r) for r in best])


def _memory_table(records: Sequence[Record]) -> str:
    columns: dict[str, Callable[[Record], str]] = {
        **_sweep_columns(records),
        "KV MB live / allocated": _live,
        "Planned MB": lambda r: _megabytes(r.get("planned_bytes")),
        "Measured MB": lambda r: _megabytes(r.get("measured_bytes")),
        "Limit MB": lambda r: _megabytes(r.get("memory_bytes")),
        "Loss": lambda r: _number(r.get("loss"), "{:.3f}"),
        "Loss of full cache": lambda r: _number(r.get("reference_loss"), "{:.3f}"),
        "Seconds": lambda r: _rate(r.get("seconds")),
        "Seed": lambda r: _text(r.get("seed")),
    }
    return _markdown(records, columns)


def _markdown(
    records: Sequence[Record],
    columns: dict[str, Callable[[Record], str]],
    labels: Sequence[str] | None = None,
) -> str:
    """One row per record, the label first; text to the left, numbers to the right."""
    head = ["Method", *columns]
    body = [
        [label, *(cell(record) for cell in columns.values())]
        for label, record in zip(labels or _row_labels(records), records, strict=True)
    ]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [head, *body]]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    left = [name in ("Method", "Schedule", "Batch (limited by)") for name in head]
    rule = [
        "-" * w if is_left else "-" * (w - 1) + ":"
        for w, is_left in zip(widths, left, strict=True)
    ]
    return "\n".join(
        "| " + " | ".join(_pad(*c) for c in zip(row, widths, left, strict=True)) + " |"
        for row in (cells[0], rule, *cells[1:])
    )


def _pad(cell: str, width: int, left: bool) -> str:
    return cell.ljust(width) if left else cell.rjust(width)


# --- report -------------------------------------------------------------------------

_READING = """\
- **KV slots** is the most key-value pairs a KV head keeps (|kv|); the full cache keeps
  all of them. **Batch** is how many prompts ran at a time, and what kept it from more.
- **Needle** is the share of prompts whose hidden pass key was found{examples}.
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
- The first table has the best method of each schedule and budget: most needles, then
  smallest KL. **As many** is how many others found as many needles; **decoding**, the
  KV cache per prompt once the prompt is in.
- In the heat map methods are sorted by their mean needle accuracy, then by KL; brighter
  is better in both panels, and a dash stands for what was not measured.
- The Pareto pictures have a column per schedule, since one that compresses after the
  prompt saves memory only from then on. A method on the line has the best quality that
  its memory, statistics included, or less can buy."""

_READING_THROUGHPUT = """\
- All methods generate the same number of tokens (**New**) for the same prompts,
  whatever ends a text. **Batch** is how many prompts decode at a time and what kept it
  from more; **Read at once**, how many prompts are read at a time.
- **End-to-end** is generated tokens by the time of prefill and decoding together, the
  median of all rounds; in brackets, how many times ED's at as many new tokens.
- **roofline** is the share of what the device could reach by its measured bandwidth and
  matrix rate, if it did only what the method needs; **Predicted**, end to end, is that
  limit, known before the run."""

_MEMORY_NOTE = """\
**KV MB live / allocated** are the keys and values of one prompt at the end: those of
the pairs kept, and of all slots. A rule that keeps fewer pairs than the budget in some
heads (fastgen, simlayerkv, scissorhands_released, a narrow sliding window) leaves slots
empty and frees nothing that is allocated: quality at a smaller live size is not memory
saved."""


def write_report(records: Sequence[Record], workdir: str | os.PathLike) -> pathlib.Path:
    """Writes report.md and its pictures.

    They are heat_map.png and pareto.png for a sweep, none for throughput, and otherwise
    quality_vs_memory.png and throughput_vs_memory.png.

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
    if not is_throughput(records):
        _draw(records, workdir)
    path = workdir / "report.md"
    path.write_text(_report(records), encoding="utf-8")
    return path


def _draw(records: Sequence[Record], workdir: pathlib.Path) -> None:
    full = _full(records)
    if is_sweep(records):
        columns = [_setting_of(r) for r in records]
        rows, settings = [_label(r) for r in records], _settings(records)
        sweep_pictures.draw(records, rows, columns, settings, full, workdir)
    else:
        pictures.draw(records, _labels(records), full, workdir)


def _report(records: Sequence[Record]) -> str:
    if is_throughput(records):
        return _throughput_report(records)
    examples = [r["examples"] for r in records if r.get("examples")]
    among = f"; of {min(examples)} prompts, one counts {1 / min(examples):.2f}"
    sweep = is_sweep(records)
    parts = [
        "# KV-cache compression: quality, speed and memory",
        _setting(records),
        *(_sweep_parts(records) if sweep else _parts(records)),
        "## How to read it",
        _READING.format(
            examples=among if examples else "", points="" if sweep else _POINTS
        ),
        *([_READING_SWEEP] if sweep else []),
        "## Memory, loss and time",
        _MEMORY_NOTE,
        _memory_table(records),
        "## Versions",
        _versions(records),
    ]
    return "\n\n".join(parts) + "\n"


def _throughput_report(records: Sequence[Record]) -> str:
    parts = [
        "# Throughput at one memory limit",
        _setting(records),
        throughput_table(records),
        "## How to read it",
        _READING_THROUGHPUT,
        "## Versions",
        _versions(records),
    ]
    return "\n\n".join(parts) + "\n"


def _parts(records: Sequence[Record]) -> list[str]:
    return [
        table(records),
        "![Quality against KV memory](quality_vs_memory.png)",
        "![Throughput against KV memory](throughput_vs_memory.png)",
    ]


def _sweep_parts(records: Sequence[Record]) -> list[str]:
    return [
        "## The best of each schedule and budget",
        _best_table(records),
        "![Needle accuracy and KL of every method](heat_map.png)",
        "![Quality against KV memory, and the best for each](pareto.png)",
        "## All methods",
        table(records),
    ]


def _setting(records: Sequence[Record]) -> str:
    """One sentence: model, device, memory limit, sizes."""

    def known(key: str, form: Callable[[Any], str] = str) -> str:
        values = dict.fromkeys(form(r[key]) for r in records if r.get(key) is not None)
        return " / ".join(values) or "unknown"

    return (
        f"Model {known('model')} on {known('device')} with a memory limit of "
        f"{known('memory_bytes', _megabytes)} MB; prompts of "
        f"{known('prompt_tokens', _count)} tokens, each followed by at most "
        f"{known('max_new_tokens', _count)} new ones."
    )


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _versions(records: Sequence[Record]) -> str:
    found = {
        f"{name} {version}"
        for record in records
        for name, version in (record.get("versions") or {}).items()
    }
    return ", ".join(sorted(found)) + "." if found else "Not recorded."
