"""Tables of records, and a table as Markdown, in a terminal and in LaTeX."""

import itertools
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvjax.evaluation.report import groups
from kvjax.evaluation.report.groups import Quality, series, spread, text
from kvjax.evaluation.report.records import PROBES, Record, Source

Columns = dict[str, Callable[[Record], str]]
_OVER = "†"
_NOTE = f"""

{_OVER} Above the memory limit. A batch is chosen by what its programs need. On a CPU
the growth of the process's resident memory is measured, with all that its allocator
holds: freed blocks that it keeps and gaps between them, of which no plan knows. On a
GPU or TPU it is the allocator's own peak."""
_APART = "‡"
_PROBE = f"""

{_APART} Something else used the machine: a fixed product and a fixed copy (Probe) ran
more than a tenth faster or slower beside this row than beside the row that it is
compared with, the full cache or ED. So there is no ratio."""
_LEFT = {"Method", "Engine", "Schedule", "Codec", "Batch (limited by)"}


class Table(NamedTuple):
    """A table of text.

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


def markdown(table: Table, width: int | None = None) -> str:
    """The table in Markdown, its columns lined up for a terminal.

    Args:
      table: what to show.
      width: of the terminal, in characters. A table that is wider comes in parts, each
        with the first column and as many others as fit, and cells of more than half the
        width go on in the next line. None: as it is, in one part.
    """
    most = (width - len("|  |  |")) // 2 if width else sys.maxsize
    head = _wrapped(table.head, most)
    rows = [
        _wrapped(row, most, {j for j in range(len(row)) if (i, j) in table.bold})
        for i, row in enumerate(table.rows)
    ]
    lines = [*head, *itertools.chain(*rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]

    def padded(line, column):
        cell, room = line[column], widths[column]
        return cell.ljust(room) if column in table.left else cell.rjust(room)

    def rule(column):
        return "-" * (widths[column] - 1) + ("-" if column in table.left else ":")

    def drawn(lines, part):
        rows = [[padded(line, column) for column in part] for line in lines]
        return [row for row in rows if any(map(str.strip, row))]

    parts = []
    for part in _parts(widths, width or sys.maxsize):
        cells = [*drawn(head, part), list(map(rule, part))]
        cells += drawn(itertools.chain(*rows), part)
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in cells))
    return "\n\n".join(parts)


def _wrapped(
    row: Sequence[str], most: int, bold: Collection[int] = ()
) -> list[tuple[str, ...]]:
    """A row's lines, none of whose cells is longer than `most`."""

    def pieces(column, cell):
        marks = "**" if column in bold else ""
        room = max(1, most - 2 * len(marks))
        found = [cell] if len(cell) <= room else textwrap.wrap(cell, room)
        return [f"{marks}{each}{marks}".replace("|", "\\|") for each in found]

    cells = [pieces(column, cell) for column, cell in enumerate(row)]
    return list(itertools.zip_longest(*cells, fillvalue=""))


def _parts(widths: Sequence[int], most: int) -> Iterator[list[int]]:
    """The columns of each part: the first one, and as many of the others as fit."""
    part, start = [0], widths[0] + len("|  |")
    taken = start
    for column, width in enumerate(widths[1:], 1):
        taken += width + len(" | ")
        if taken > most and len(part) > 1:
            yield part
            part, taken = [0], start + width + len(" | ")
        part.append(column)
    yield part


def terminal_width() -> int | None:
    """Characters in a line of the terminal; None where stdout is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


# --- numbers --------------------------------------------------------------------------


def number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if pd.isna(value) else form.format(value)


def rate(value: float | None) -> str:
    """Three significant digits, and no fraction from 100 on."""
    if value is None or not math.isfinite(value):
        return number(value)
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f}"


def between(task: Record, form: str = "{:.2f}", scale: float = 1.0) -> str:
    """The ends of a task's interval, in brackets; nothing where it has none."""
    ends = [form.format(scale * end) for end in task.get("interval") or ()]
    return f" ({'-'.join(ends)})" if ends else ""


def megabytes(value: float | None) -> str:
    return "-" if value is None else rate(value / 1e6)


def kl(value: float | None) -> str:
    return "<0.001" if value and 0 < value < 0.001 else number(value, "{:.3f}")


def perplexity(loss: float | None) -> str:
    """Of a mean loss in nats per token."""
    return "-" if groups.finite(loss) is None else rate(math.exp(min(loss, 700)))


def versions(records: Sequence[Record]) -> str:
    """Names and versions of the software that made records."""
    made = [record.get("provenance", {}).get("versions") or {} for record in records]
    found = {f"{name} {version}" for each in made for name, version in each.items()}
    return ", ".join(sorted(found)) or "versions not recorded"


def _of(key: str, form: Callable[[Any], str] | str = "{:.2f}"):
    """A cell that says one field."""
    shown = form if callable(form) else lambda value: number(value, form)
    return lambda record: shown(record.get(key))


def _batch(record: Record) -> str:
    limit = record.get("limited_by")
    return text(record.get("batch_size")) + (f" ({limit})" if limit else "")


def _measured(record: Record) -> str:
    return megabytes(record.get("measured_bytes")) + (_OVER if _is_over(record) else "")


def _is_over(record: Record) -> bool:
    measured, limit = record.get("measured_bytes"), record.get("memory_bytes")
    return None not in (measured, limit) and measured > limit


def note(records: Sequence[Record]) -> str:
    """A paragraph below a table of measured memory, if some is above its limit."""
    return _NOTE if any(map(_is_over, records)) else ""


def _probes(records: Sequence[Record]) -> Columns:
    """A column of probes where some were made; marked are those that differ."""
    if all(record.get(key) is None for record in records for key in PROBES):
        return {}

    def shown(record):
        product, copy = (record.get(key) for key in PROBES)
        if product is None or copy is None:
            return "-"
        apart = any(groups.differs(record, base) for base in _bases(record, records))
        mark = _APART if apart else ""
        return f"{rate(product / 1e9)} / {rate(copy / 1e9)}{mark}"

    return {"Probe GFLOP/s / GB/s": shown}


def _bases(record: Record, records: Sequence[Record]) -> list[Record]:
    """What a row's rate is compared with: the full cache, in throughput ED too."""
    if not groups.is_throughput(records):
        return [groups.full_cache(records)]
    return [groups.of_rule(record, records, rule) for rule in ("ed", "full")]


def probe_note(records: Sequence[Record]) -> str:
    """A paragraph below a table of rates, if some cannot be compared."""
    apart = (groups.differs(r, base) for r in records for base in _bases(r, records))
    return _PROBE if any(apart) else ""


def _task_score(task: Record) -> str:
    return number(task.get("score")) + between(task)


def _score(record: Record) -> str:
    """The score; its interval where it is one task's, as a mean of several has none."""
    told = list((record.get("tasks") or {}).values())
    return number(record.get("score")) + (between(told[0]) if len(told) == 1 else "")


def _live(record: Record) -> str:
    """Bytes of a prompt's pairs, and of the slots that they lie in."""
    live, allocated = record.get("kv_bytes_live"), record.get("kv_bytes_allocated")
    return "-" if live is None else f"{megabytes(live)} / {megabytes(allocated)}"


# --- tables of one run ----------------------------------------------------------------

_CELLS: Columns = {  # what a column says of a record
    "As many": _of("equals", text),
    "Batch (limited by)": _batch,
    "Decode tok/s": _of("decode_tokens_per_s", rate),
    "End-to-end tok/s": _of("output_tokens_per_s", rate),
    "Engine": lambda r: r.get("engine", "kvjax"),
    "Host MB/prompt": _of("host_bytes_per_seq", megabytes),
    "KL": _of("kl", kl),
    "KV MB live / allocated": _live,
    "KV MB/prompt": _of("kv_bytes_peak_per_seq", megabytes),
    "Limit MB": _of("memory_bytes", megabytes),
    "Loss": _of("loss", "{:.3f}"),
    "Loss of full cache": _of("reference_loss", "{:.3f}"),
    "Measured MB": _measured,
    "New": _of("new_tokens", text),
    "Perplexity": lambda r: perplexity(r.get("loss")),
    "Planned MB": _of("planned_bytes", megabytes),
    "Predicted": _of("predicted_tokens_per_s", rate),
    "Prefill tok/s": _of("prefill_tokens_per_s", rate),
    "Prompts": _of("num_examples", text),
    "Read at once": _of("prefill_batch", text),
    "Seconds": _of("seconds", rate),
    "Seed": _of("seed", text),
    "Top-1": _of("top1_agreement"),
    "decoding": _of("kv_bytes_decode", megabytes),
    "of roofline": _of("prefill_roofline"),
    "roofline": _of("decode_roofline"),
}


def _cells(*names: str) -> Columns:
    return {name: _CELLS[name] for name in names}


def run_table(records: Sequence[Record]) -> Table:
    """All methods of a run: quality, rates and memory."""
    full = groups.full_cache(records)

    def end_to_end(record):
        times = groups.speedup(record, full)
        shown = "" if times is None else f" ({times:.2f}x)"
        return rate(record.get("output_tokens_per_s")) + shown

    columns = _methods(records) | _cells("Batch (limited by)")
    columns[groups.score_of(records).column] = _score
    columns |= _cells("KL", "Top-1", "Prefill tok/s", "Decode tok/s")
    columns |= {"End-to-end tok/s": end_to_end} | _probes(records)
    columns |= _cells("KV MB/prompt")
    if any(record.get("host_bytes_per_seq") for record in records):
        columns |= _cells("Host MB/prompt")
    return _table(records, columns, _row_names(records))


def best_table(records: Sequence[Record]) -> Table:
    """The full cache, and the best method of each schedule and budget of a sweep.

    The best has the highest score (the most needles found) and, among those that share
    it, the smallest KL.
    """
    full, frame = groups.full_cache(records), groups.sweep(records)
    peers = frame.groupby(["setting", "slots", "score"], dropna=False)
    frame["equals"] = peers["series"].transform("size") - 1
    best = frame.drop_duplicates(["setting", "slots"])
    pairs = zip(best["record"], best["equals"], strict=True)
    shown = [*([full] if full else []), *(r | {"equals": n} for r, n in pairs)]
    columns = _methods(shown) | {groups.score_of(records).column: _score}
    columns |= _cells("As many", "KL", "Top-1", "Decode tok/s", "KV MB/prompt")
    columns |= _cells("decoding")
    return _table(shown, columns, list(map(series, shown)))


def by_task_table(records: Sequence[Record]) -> Table:
    """The scores of every task."""
    return _table(records, _by_task(records), groups.names_of(records))


def memory_table(records: Sequence[Record]) -> Table:
    """Bytes as planned and measured, losses, time."""
    columns = _methods(records) if groups.is_sweep(records) else {}
    columns |= _cells("KV MB live / allocated", "Planned MB", "Measured MB", "Limit MB")
    columns |= _cells("Loss", "Loss of full cache", "Perplexity", "Seconds", "Seed")
    return _table(records, columns, _row_names(records))


def perplexity_table(records: Sequence[Record]) -> Table:
    """Perplexities of a sweep: a row per method, a column per budget, rising."""
    ran = sorted((r for r in records if r.get("loss") is not None), key=_slots)
    found: dict[tuple[str, str], dict[str, str]] = {}
    for record in sorted(ran, key=records.index):
        row = found.setdefault((series(record), groups.setting(record)), {})
        row[groups.budget(record)] = perplexity(record["loss"])
    budgets = list(dict.fromkeys(map(groups.budget, ran)))
    rows = [
        [*names, *(row.get(b, "-") for b in budgets)] for names, row in found.items()
    ]
    return Table(["Method", "Schedule", *budgets], rows, frozenset({0, 1}))


def _slots(record: Record) -> float:
    """What budgets are sorted by; all pairs come last."""
    return groups.mean_slots(record) or math.inf


def throughput_table(records: Sequence[Record]) -> Table:
    """Batches, rates, shares of the roofline and scores, by number of new tokens.

    `x ED` and `x FKV` are end-to-end rates relative to theirs at as many new tokens.
    """
    other = {record.get("engine", "kvjax") for record in records} != {"kvjax"}
    columns = _cells("Engine", "New") if other else _cells("New")
    columns |= {k: v for k, v in _methods(records).items() if k != "Schedule"}
    columns |= _cells("Batch (limited by)", "Read at once", "Prefill tok/s")
    columns |= _cells("of roofline", "Decode tok/s", "roofline", "End-to-end tok/s")
    columns["x ED"] = lambda r: number(groups.times(r, records, "ed"))
    columns["x FKV"] = lambda r: number(groups.times(r, records, "full"))
    columns |= _probes(records)
    columns |= _cells("Predicted") | _scores(records)
    columns |= _cells("Planned MB", "Measured MB")
    return _table(records, columns, [text(r.get("method")) for r in records])


def search_table(records: Sequence[Record]) -> Table:
    """Batch-Max's: every |kv| that was tried, the chosen one in bold, and all others.

    An end-to-end rate is of what ran, which for a |kv| that could no longer keep the
    score is not all prompts.
    """
    shown = [
        record | each for record in records for each in record.get("tried") or [{}]
    ]
    columns = _cells("New", "Batch (limited by)") | {"KV slots": groups.slots}
    columns |= {"Score": _of("score", "{:.3f}")} | _cells("Prompts")
    columns |= _cells("End-to-end tok/s", "Predicted")
    made = _table(shown, columns, [text(record.get("method")) for record in shown])
    chosen = [row for row, record in enumerate(shown) if record.get("chosen")]
    bold = itertools.product(chosen, range(len(made.head)))
    return made._replace(bold=frozenset(bold))


def _scores(records: Sequence[Record]) -> Columns:
    """A column of each task's scores, unless needles are all that was looked for."""
    column = groups.score_of(records).column
    return {column: _score} if column == "Needle" else _by_task(records)


def _by_task(records: Sequence[Record]) -> Columns:
    def of_task(name):
        return lambda r: _task_score((r.get("tasks") or {}).get(name, {}))

    metrics = groups.metrics_of(records).items()
    return {f"{name} ({metric})": of_task(name) for name, metric in metrics}


def _methods(records: Sequence[Record]) -> Columns:
    """What is kept, when, and how; the codec, only where somebody has one."""
    encoded = any(groups.codec(record) != "identity" for record in records)
    codec = {"Codec": groups.codec} if encoded else {}
    return {"Schedule": groups.schedule, "KV slots": spread} | codec


def _row_names(records: Sequence[Record]) -> list[str]:
    """First cells of a table: in a sweep, columns tell budget and schedule."""
    if groups.is_sweep(records):
        return list(map(series, records))
    return groups.names_of(records)


def _table(records: Sequence[Record], columns: Columns, names: Sequence[str]) -> Table:
    """A row per record: its name, and what each column says of it."""
    head = ["Method", *columns]
    rows = [
        [name, *(cell(record) for cell in columns.values())]
        for name, record in zip(names, records, strict=True)
    ]
    return Table(head, rows, frozenset(i for i, h in enumerate(head) if h in _LEFT))


# --- tables of several runs -----------------------------------------------------------


def score_table(group: Quality) -> Table:
    """Methods by tasks, in points of 100; bold is the best of its budget."""
    names, cells = _rows(group)
    told = group.scores.map(points) + group.pivot("task").map(_points_between)
    told["Mean Δ"] = _differences(group)
    best = group.best.assign(mean=group.differences["best"]).to_numpy()
    bold = {(i, len(names) + j) for i, j in np.argwhere(best).tolist()}
    rows = [[*cells(row), *told.loc[row]] for row in group.rows]
    budgets = [row[2] for row in group.rows]
    breaks = {i for i in range(1, len(rows)) if budgets[i] != budgets[i - 1]}
    left = frozenset(range(len(names)))
    head = [*names, *told.columns]
    return Table(head, rows, left, frozenset(bold), frozenset(breaks))


def rank_table(group: Quality) -> Table:
    """All methods by their mean difference to the full cache, a rank at each budget.

    Those that did not run every task come last and have no rank.
    """
    names, cells = _rows(group)
    frame = group.differences.assign(
        told=_differences(group), wins=group.best.sum(axis=1)
    )
    for key in ("decode", "peak"):
        values = group.pivot(key)
        frame[key] = (values / group.of_full(values)).mean(axis=1)
    rows, breaks = [], set()
    for _, peers in frame.groupby("budget", sort=False):
        breaks |= {len(rows)} if rows else set()
        ranked = peers["rank"].notna()
        by = peers["mean"].where(ranked).sort_values(ascending=False, kind="stable")
        for row, each in peers.loc[by.index].iterrows():
            wins = str(each["wins"]) if ranked.any() else "-"
            shares = [number(each[key], "{:.0%}") for key in ("decode", "peak")]
            place = number(each["rank"], "{:.0f}")
            rows.append([place, *cells(row), each["told"], wins, *shares])
    head = ["Rank", *names, "Mean Δ", "Best on", "KV decoding", "KV peak"]
    left = frozenset(range(1, 1 + len(names)))
    return Table(head, rows, left, breaks=frozenset(breaks))


def task_table(group: Quality) -> Table:
    """What each column of scores is: metric, prompts, |kv| at each budget, source."""
    answers, whole = group.answers, group.full
    budgets = [row[2] for row in group.rows if row != whole]
    budgets = [b for b in dict.fromkeys(budgets) if not b.replace(",", "").isdigit()]
    head = ["Task", "Metric", "Prompts", "Tokens (mean)", "Cut", "New"]
    head += [*(f"|kv| at {budget}" for budget in budgets), "Seed", "Run"]
    paths = [source.path for source in group.sources]
    rows = []
    for name, found in answers.groupby("column", sort=False):
        first = found.iloc[0]
        sizes = found.groupby("budget")["slots"].unique()
        mean = first["task"].get("prompt_tokens") or first["prompt_tokens"]
        rows.append(
            [name, first["task"]["metric"], number(first["num_examples"], "{:.0f}")]
            + [number(mean, "{:,.0f}"), text(first["task"].get("cut_prompts"))]
            + [number(first["new_tokens"], "{:.0f}")]
            + [" / ".join(sorted(sizes.get(b, ["-"]))) for b in budgets]
            + [number(first["seed"], "{:.0f}")]
            + [", ".join(str(paths.index(p) + 1) for p in found["path"].unique())]
        )
    return Table(head, rows, frozenset({0, 1}))


def provenance(group: Quality | groups.Throughput) -> str:
    """Where figures come from, as Markdown: a numbered line per file."""
    lines = [f"Model {group.model} on {group.device}. Records and what made them:", ""]
    for number, source in enumerate(group.sources, 1):
        torn = "; its last line was cut short and is left out" if source.torn else ""
        lines.append(f"{number}. `{source.path}`: {_made(source)}{torn}")
    return "\n".join(lines)


def _made(source: Source) -> str:
    made = [r.get("provenance", {}).get("command") for r in source.records]
    commands = " / ".join(f"`{each}`" for each in dict.fromkeys(made) if each)
    seeds = dict.fromkeys(r.get("seed") for r in source.records)
    told = " / ".join(str(seed) for seed in seeds if seed is not None)
    return (
        f"{commands or 'command not recorded'}; seed {told or 'unknown'}; "
        f"{versions(source.records)}"
    )


def _rows(group: Quality) -> tuple[list[str], Callable[[tuple], list[str]]]:
    """What the first columns are called, and how a method fills them."""
    encoded = any(row[3] != "identity" for row in group.rows)
    names = ["Method", "Schedule", "Budget", *(["Codec"] if encoded else [])]
    return names, lambda row: list(row)[: len(names)]


def points(share: float | None, form: str = "{:.1f}") -> str:
    return "-" if pd.isna(share) else form.format(100 * share)


def _points_between(task: Record | float) -> str:
    """Whole points; `task` is NaN where a method has not run it."""
    return between(task, "{:.0f}", 100) if isinstance(task, dict) else ""


def _differences(group: Quality) -> list[str]:
    """In points; in brackets of how many tasks, where some are missing."""
    count, told = len(group.columns), []
    for row, each in group.differences.iterrows():
        missing = "" if each["count"] == count else f" ({each['count']} of {count})"
        unknown = row == group.full or pd.isna(each["mean"])
        told.append("-" if unknown else points(each["mean"], "{:+.1f}") + missing)
    return told
