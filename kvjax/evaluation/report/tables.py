"""Tables of records: which columns they have, and how values are written."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvjax.evaluation.report import groups
from kvjax.evaluation.report.grids import Table
from kvjax.evaluation.report.groups import Quality, series, spread, text
from kvjax.evaluation.report.records import PROBES, Record, Source

Columns = dict[str, Callable[[Record], str]]
_OVER = "†"
_NOTE = f"""

{_OVER} Above the memory limit. The batch is chosen by what its compiled programs need.
On a CPU the growth of the process's resident memory is measured, which includes freed
blocks that the allocator holds and gaps between them. On a GPU or TPU it is the
allocator's own peak."""
_APART = "‡"
_PROBE = f"""

{_APART} Something else used the machine: a fixed matrix product and a fixed copy
(Probe) ran more than a tenth faster or slower beside this row than beside the row that
it is compared with, the full cache or ED. So there is no ratio."""
_KEYS = {"Engine", "New", "Schedule", "KV slots"}  # with the method, they name a row
_LEFT = {"Method", "Engine", "Schedule", "Codec", "Batch (limited by)"}


# --- numbers --------------------------------------------------------------------------


def number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if pd.isna(value) else form.format(value)


def rate(value: float | None) -> str:
    """Returns three significant digits, and no fraction from 100 on."""
    if value is None or not math.isfinite(value):
        return number(value)
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f}"


def interval(task: Record, form: str = "{:.2f}", scale: float = 1.0) -> str:
    """Returns a task's confidence interval in brackets; nothing where it has none."""
    ends = [form.format(scale * end) for end in task.get("interval") or ()]
    return f" ({'-'.join(ends)})" if ends else ""


def megabytes(value: float | None) -> str:
    return "-" if value is None else rate(value / 1e6)


def kl(value: float | None) -> str:
    return "<0.001" if value and 0 < value < 0.001 else number(value, "{:.3f}")


def perplexity(loss: float | None) -> str:
    """Returns the perplexity of a mean loss in nats per token."""
    return "-" if groups.finite(loss) is None else rate(math.exp(min(loss, 700)))


def versions(records: Sequence[Record]) -> str:
    """Returns names and versions of the software that made the records."""
    made = [record.get("provenance", {}).get("versions") or {} for record in records]
    found = {f"{name} {version}" for each in made for name, version in each.items()}
    return ", ".join(sorted(found)) or "versions not recorded"


# --- cells ----------------------------------------------------------------------------


def _field(key: str, form: Callable[[Any], str] | str = "{:.2f}"):
    """Returns a column that shows one field."""
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


def _live(record: Record) -> str:
    live, allocated = record.get("kv_bytes_live"), record.get("kv_bytes_allocated")
    return "-" if live is None else f"{megabytes(live)} / {megabytes(allocated)}"


def _task_score(task: Record) -> str:
    return number(task.get("score")) + interval(task)


def _score(record: Record) -> str:
    """Returns the score, with its interval if it is of one task."""
    return number(record.get("score")) + interval(groups.only_task(record))


def note(records: Sequence[Record]) -> str:
    """Returns the paragraph below a table with memory above its limit, if any is."""
    return _NOTE if any(map(_is_over, records)) else ""


def probe_note(records: Sequence[Record]) -> str:
    """Returns the paragraph below a table with rates that cannot be compared."""
    apart = (groups.differs(r, base) for r in records for base in _bases(r, records))
    return _PROBE if any(apart) else ""


def _probes(records: Sequence[Record]) -> Columns:
    """Returns the column of probes if there are any; those that differ are marked."""
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
    """Returns the rows that a row's rate is compared with: the full cache, or ED."""
    if not groups.is_throughput(records):
        return [groups.full_cache(records)]
    return [groups.of_batch_rule(record, records, rule) for rule in ("ed", "full")]


# --- tables of one run ----------------------------------------------------------------

_CELLS: Columns = {
    "As many": _field("equals", text),
    "Batch (limited by)": _batch,
    "Decode tok/s": _field("decode_tokens_per_s", rate),
    "End-to-end tok/s": _field("output_tokens_per_s", rate),
    "Engine": lambda r: r.get("engine", "kvjax"),
    "Host MB/prompt": _field("host_bytes_per_seq", megabytes),
    "KL": _field("kl", kl),
    "KV MB live / allocated": _live,
    "KV MB/prompt": _field("kv_bytes_peak_per_seq", megabytes),
    "Limit MB": _field("memory_bytes", megabytes),
    "Loss": _field("loss", "{:.3f}"),
    "Loss of full cache": _field("reference_loss", "{:.3f}"),
    "Measured MB": _measured,
    "New": _field("new_tokens", text),
    "Perplexity": lambda r: perplexity(r.get("loss")),
    "Planned MB": _field("planned_bytes", megabytes),
    "Predicted": _field("predicted_tokens_per_s", rate),
    "Prefill tok/s": _field("prefill_tokens_per_s", rate),
    "Prompts": _field("num_examples", text),
    "Read at once": _field("prefill_batch", text),
    "Seconds": _field("seconds", rate),
    "Seed": _field("seed", text),
    "Top-1": _field("top1_agreement"),
    "decoding": _field("kv_bytes_decode", megabytes),
    "of roofline": _field("prefill_roofline"),
    "roofline": _field("decode_roofline"),
}


def _cells(*names: str) -> Columns:
    return {name: _CELLS[name] for name in names}


def run_table(records: Sequence[Record]) -> Table:
    """Returns all methods of a run: quality, rates and memory."""
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
    """Returns the full cache and the best method of each schedule and budget.

    The best method has the highest score and, among equal scores, the smallest KL.
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
    """Returns the scores of every task."""
    return _table(records, _by_task(records), groups.names_of(records))


def memory_table(records: Sequence[Record]) -> Table:
    """Returns bytes as planned and measured, losses and time."""
    columns = _methods(records) if groups.is_sweep(records) else {}
    columns |= _cells("KV MB live / allocated", "Planned MB", "Measured MB", "Limit MB")
    columns |= _cells("Loss", "Loss of full cache", "Perplexity", "Seconds", "Seed")
    return _table(records, columns, _row_names(records))


def perplexity_table(records: Sequence[Record]) -> Table:
    """Returns a sweep's perplexities: a row per method, a column per rising budget."""
    ran = sorted((r for r in records if r.get("loss") is not None), key=_slots)
    found: dict[tuple[str, str], dict[str, str]] = {}
    for record in sorted(ran, key=records.index):
        row = found.setdefault((series(record), groups.setting(record)), {})
        row[groups.budget(record)] = perplexity(record["loss"])
    budgets = list(dict.fromkeys(map(groups.budget, ran)))
    rows = [
        [*names, *(row.get(b, "-") for b in budgets)] for names, row in found.items()
    ]
    return Table(["Method", "Schedule", *budgets], rows, frozenset({0, 1}), keys=2)


def _slots(record: Record) -> float:
    """Returns the number that budgets are sorted by; the full cache comes last."""
    return groups.mean_slots(record) or math.inf


def throughput_table(records: Sequence[Record]) -> Table:
    """Returns batches, rates, shares of the roofline and scores of each method.

    `x ED` and `x FKV` are end-to-end rates relative to those of ED and of the full
    cache at the same number of new tokens.
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
    """Returns every |kv| that Batch-Max tried, the chosen one in bold.

    Other methods have one row each. A |kv| that could no longer keep the score was
    stopped before all prompts had run; its end-to-end rate is of those that had.
    """
    shown = [
        record | each for record in records for each in record.get("tried") or [{}]
    ]
    columns = _cells("New", "Batch (limited by)") | {"KV slots": groups.slots}
    columns |= {"Score": _field("score", "{:.3f}")} | _cells("Prompts")
    columns |= _cells("End-to-end tok/s", "Predicted")
    made = _table(shown, columns, [text(record.get("method")) for record in shown])
    chosen = [row for row, record in enumerate(shown) if record.get("chosen")]
    bold = itertools.product(chosen, range(len(made.head)))
    return made._replace(bold=frozenset(bold))


def _scores(records: Sequence[Record]) -> Columns:
    """Returns a column for each task's scores, or one if needles are the only task."""
    column = groups.score_of(records).column
    return {column: _score} if column == "Needle" else _by_task(records)


def _by_task(records: Sequence[Record]) -> Columns:
    def of_task(name):
        return lambda r: _task_score((r.get("tasks") or {}).get(name, {}))

    metrics = groups.metrics_of(records).items()
    return {f"{name} ({metric})": of_task(name) for name, metric in metrics}


def _methods(records: Sequence[Record]) -> Columns:
    """Returns the columns of schedule and budget, and of the codec if there is any."""
    encoded = any(groups.codec(record) != "identity" for record in records)
    codec = {"Codec": groups.codec} if encoded else {}
    return {"Schedule": groups.schedule, "KV slots": spread} | codec


def _row_names(records: Sequence[Record]) -> list[str]:
    """Returns names of rows; of a sweep, other columns hold budget and schedule."""
    if groups.is_sweep(records):
        return list(map(series, records))
    return groups.names_of(records)


def _table(records: Sequence[Record], columns: Columns, names: Sequence[str]) -> Table:
    """Returns a row per record: its name, and a cell for each column."""
    head = ["Method", *columns]
    rows = [
        [name, *(cell(record) for cell in columns.values())]
        for name, record in zip(names, records, strict=True)
    ]
    left = frozenset(i for i, h in enumerate(head) if h in _LEFT)
    more = itertools.takewhile(_KEYS.__contains__, columns)
    keys = 1 if len({*names}) == len(rows) else 1 + len(list(more))
    return Table(head, rows, left, keys=keys)


# --- tables of several runs -----------------------------------------------------------


def score_table(group: Quality) -> Table:
    """Returns methods by tasks, in points of 100, the best of a budget in bold."""
    names, cells = _rows(group)
    shown = group.scores.map(points) + group.pivot("task").map(_points_interval)
    shown["Mean Δ"] = _differences(group)
    best = group.best.assign(mean=group.differences["best"]).to_numpy()
    bold = {(i, len(names) + j) for i, j in np.argwhere(best).tolist()}
    rows = [[*cells(row), *shown.loc[row]] for row in group.rows]
    budgets = [row[2] for row in group.rows]
    breaks = {i for i in range(1, len(rows)) if budgets[i] != budgets[i - 1]}
    left = frozenset(range(len(names)))
    head = [*names, *shown.columns]
    return Table(head, rows, left, frozenset(bold), frozenset(breaks), keys=len(names))


def rank_table(group: Quality) -> Table:
    """Returns all methods ranked within each budget by mean difference to full cache.

    Methods that did not run every task come last and have no rank.
    """
    names, cells = _rows(group)
    frame = group.differences.assign(
        difference=_differences(group), wins=group.best.sum(axis=1)
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
            rows.append([place, *cells(row), each["difference"], wins, *shares])
    head = ["Rank", *names, "Mean Δ", "Best on", "KV decoding", "KV peak"]
    left = frozenset(range(1, 1 + len(names)))
    return Table(head, rows, left, breaks=frozenset(breaks), keys=1 + len(names))


def task_table(group: Quality) -> Table:
    """Returns the metric, prompts, |kv| at each budget and source of every task."""
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
    """Returns where numbers come from, as Markdown: a numbered line per file."""
    lines = [f"Model {group.model} on {group.device}. Records and what made them:", ""]
    for number, source in enumerate(group.sources, 1):
        torn = "; its last line was cut short and is left out" if source.torn else ""
        lines.append(f"{number}. `{source.path}`: {_made(source)}{torn}")
    return "\n".join(lines)


def _made(source: Source) -> str:
    made = [r.get("provenance", {}).get("command") for r in source.records]
    commands = " / ".join(f"`{each}`" for each in dict.fromkeys(made) if each)
    seeds = dict.fromkeys(r.get("seed") for r in source.records)
    known = " / ".join(str(seed) for seed in seeds if seed is not None)
    return (
        f"{commands or 'command not recorded'}; seed {known or 'unknown'}; "
        f"{versions(source.records)}"
    )


def _rows(group: Quality) -> tuple[list[str], Callable[[tuple], list[str]]]:
    """Returns the names of the key columns, and a function from a method to them."""
    encoded = any(row[3] != "identity" for row in group.rows)
    names = ["Method", "Schedule", "Budget", *(["Codec"] if encoded else [])]
    return names, lambda row: list(row)[: len(names)]


def points(share: float | None, form: str = "{:.1f}") -> str:
    return "-" if pd.isna(share) else form.format(100 * share)


def _points_interval(task: Record | float) -> str:
    """Returns whole points; `task` is NaN where a method has not run it."""
    return interval(task, "{:.0f}", 100) if isinstance(task, dict) else ""


def _differences(group: Quality) -> list[str]:
    """Returns points, and in brackets over how many tasks where some are missing."""
    count, shown = len(group.columns), []
    for row, each in group.differences.iterrows():
        missing = "" if each["count"] == count else f" ({each['count']} of {count})"
        unknown = row == group.full or pd.isna(each["mean"])
        shown.append("-" if unknown else points(each["mean"], "{:+.1f}") + missing)
    return shown
