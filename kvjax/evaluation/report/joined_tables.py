"""The tables of joined runs: scores by task, leaderboard, tasks, where it is from."""

from collections.abc import Sequence

import numpy as np

from kvjax.evaluation.report import cells
from kvjax.evaluation.report.grids import Grid
from kvjax.evaluation.report.joined_runs import Column, Quality, Row, Source
from kvjax.evaluation.report.records import Record

_BYTES = ("kv_bytes_decode", "kv_bytes_per_row")


def scores(group: Quality) -> Grid:
    """Methods by tasks, in points of 100; bold is the best of its budget."""
    columns = list(group.columns)
    head = ["Method", "Schedule", "Budget", *group.columns.values(), "Mean Δ"]
    rows, bold, breaks = [], set(), set()
    for i, row in enumerate(group.rows):
        told = [_points(group.score(row, column)) for column in columns]
        rows.append([*row, *told, _difference(group, row)])
        best = [j for j, column in enumerate(columns) if group.best(row, column)]
        bold |= {(i, 3 + j) for j in best}
        if _is_best(group, row):
            bold.add((i, 3 + len(columns)))
        if i and row.budget != group.rows[i - 1].budget:
            breaks.add(i)
    left = frozenset({0, 1, 2})
    return Grid(head, rows, left, frozenset(bold), frozenset(breaks))


def _points(share: float | None, form: str = "{:.1f}") -> str:
    return "-" if share is None else form.format(100 * share)


def _difference(group: Quality, row: Row) -> str:
    """In points; in brackets of how many tasks, where some are missing."""
    value, count = group.difference(row)
    if row == group.full or value is None:
        return "-"
    of = "" if count == len(group.columns) else f" ({count} of {len(group.columns)})"
    return _points(value, "{:+.1f}") + of


def _complete(group: Quality, budget: str | None = None) -> list[Row]:
    """The methods that ran all tasks, the best first; of one budget, if it is given."""
    rows = [r for r in group.rows if r != group.full and budget in (None, r.budget)]
    rows = [r for r in rows if group.difference(r)[1] == len(group.columns)]
    return sorted(rows, key=lambda r: -group.difference(r)[0])


def _is_best(group: Quality, row: Row) -> bool:
    ranked = _complete(group, row.budget)
    values = {_shown(group, other) for other in ranked}
    return row in ranked and len(values) > 1 and _shown(group, row) == max(values)


def leaderboard(group: Quality) -> Grid:
    """All methods by their mean difference to the full cache, a rank at each budget.

    Those that did not run every task come last and have no rank.
    """
    head = ["Rank", "Method", "Schedule", "Budget", "Mean Δ", "Best on"]
    head += ["KV decoding", "KV peak"]
    rows, breaks = [], set()
    for budget in dict.fromkeys(row.budget for row in group.rows):
        ranked = _complete(group, budget)
        rest = [r for r in group.rows if r.budget == budget and r not in ranked]
        breaks |= {len(rows)} if rows else set()
        for row in [*ranked, *rest]:
            best = [group.best(row, column) for column in group.columns]
            place = _rank(group, row, ranked)
            shares = [_share(group, row, key) for key in _BYTES]
            told = [_difference(group, row), str(sum(best)) if ranked else "-"]
            rows.append([place, *row, *told, *shares])
    return Grid(head, rows, frozenset({1, 2, 3}), breaks=frozenset(breaks))


def _rank(group: Quality, row: Row, ranked: Sequence[Row]) -> str:
    """One more than how many are better; equals share a rank."""
    if row not in ranked:
        return "-"
    value = _shown(group, row)
    return str(1 + sum(_shown(group, other) > value for other in ranked))


def _shown(group: Quality, row: Row) -> float:
    """The difference by as many digits as tables show: what looks equal is equal."""
    return round(group.difference(row)[0], 3)


def _share(group: Quality, row: Row, key: str) -> str:
    """Mean share of the full cache's bytes."""
    shares = [
        cells.ratio(group.found[row, column].record, full.record, key)
        for column in group.columns
        if (full := group.found.get((group.full, column)))
        and (row, column) in group.found
    ]
    known = [share for share in shares if share is not None]
    return f"{np.mean(known):.0%}" if known else "-"


def tasks(group: Quality) -> Grid:
    """What each column of `scores` is: metric, prompts, |kv| at each budget, source."""
    budgets = [row.budget for row in group.rows if row != group.full]
    budgets = [b for b in dict.fromkeys(budgets) if not b.replace(",", "").isdigit()]
    head = ["Task", "Metric", "Prompts", "Tokens (mean)", "Cut", "New"]
    head += [*(f"|kv| at {budget}" for budget in budgets), "Seed", "Run"]
    rows = []
    for column, name in group.columns.items():
        found = [f for (_, c), f in group.found.items() if c == column]
        task, mean = found[0].task, found[0].task.get("prompt_tokens")
        runs = dict.fromkeys(group.sources.index(f.source) + 1 for f in found)
        rows.append(
            [name, task["metric"], cells.text(column.examples)]
            + [f"{mean:,.0f}" if mean else cells.text(column.prompt_tokens)]
            + [cells.text(task.get("cut_prompts")), cells.text(column.new_tokens)]
            + [_slots(group, column, budget) for budget in budgets]
            + [cells.text(column.seed), ", ".join(map(str, runs))]
        )
    return Grid(head, rows, frozenset({0, 1}))


def _slots(group: Quality, column: Column, budget: str) -> str:
    shown = {
        cells.slots(each.record)
        for (row, c), each in group.found.items()
        if c == column and row.budget == budget
    }
    return " / ".join(sorted(shown)) or "-"


def provenance(sources: Sequence[Source], model: str, device: str) -> str:
    """Where figures come from, as Markdown: a numbered line per file."""
    lines = [
        f"{number}. {_quoted(source.path)}: {_made(source.records)}"
        + ("; its last line was cut short and is left out" if source.torn else "")
        for number, source in enumerate(sources, 1)
    ]
    return f"Model {model} on {device}. Records and what made them:\n\n" + "\n".join(
        lines
    )


def _made(records: Sequence[Record]) -> str:
    commands = dict.fromkeys(r["command"] for r in records if r.get("command"))
    told = " / ".join(map(_quoted, commands)) or "command not recorded"
    seeds = dict.fromkeys(str(r["seed"]) for r in records if r.get("seed") is not None)
    return f"{told}; seed {' / '.join(seeds) or 'unknown'}; {cells.versions(records)}"


def _quoted(text: str) -> str:
    return f"`{text}`"
