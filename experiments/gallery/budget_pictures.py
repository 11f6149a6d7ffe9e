"""Draws what budget rules find as fewer KV pairs are kept, and writes it as tables.

    python experiments/gallery/budget_pictures.py docs/data/heads_{50,25,12}.jsonl \\
        docs/data/heads_squeeze_*.jsonl docs/data/heads_{2000,3500}_*.jsonl

Takes folders or records of `configs/heads.py`. The pictures have a column per policy, a
row per prompt length and a line per budget rule, over the share of pairs that is kept.
heads_found.png shows the score in percent of the full cache of the same run,
heads_kl.png the KL to its predictions; lines skip what was not run. heads.md holds both
as numbers, and nats, for all policies and budget rules of the runs.

The last line on stdout is one JSON object.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pandas as pd
from absl import flags

from kvjax.cli import command
from kvjax.evaluation import files, report
from kvjax.evaluation.report import figures, grids, groups
from kvjax.evaluation.report.records import Record
from kvjax.types import UserError

_WORKDIR = flags.DEFINE_string("workdir", "runs/report", "Where the pictures go.")
_WAYS = flags.DEFINE_list(
    "ways",
    ["alike", "pyramid", "squeeze", "by layer", "by head"],
    "Budget rules that have a line, as methods call them; none: all.",
)
_RULES = flags.DEFINE_list(
    "rules", [], "Policies that have a column, as methods' series call them; none: all."
)
_TITLE = flags.DEFINE_string(
    "title",
    "Sizes by rule, share and length",
    "The title of heads.md.",
)
_HOW_TO_READ = """\
Written by `experiments/gallery/budget_pictures.py`. A cell has the keys found, in
percent of those that the full cache of the same run finds; nats per token above the
full cache on other text; KL to its predictions. **Bold**: no other budget rule finds
more. Empty cells were not run."""
_METHOD = ["rule", "way", "length", "share"]
_MEASURES = {  # a column of `table`: what its axis says, and the file
    "found": ("found, % of the full cache", "heads_found.png"),
    "kl": ("KL to the full cache, nats", "heads_kl.png"),
}


def main(argv):
    rows = table(report.read(argv[1:]))
    page = as_markdown(rows, _TITLE.value)
    rules = _chosen("rules", _RULES.value, rows["rule"])
    rows = rows[rows["rule"].isin(rules)]
    ways = _chosen("ways", _WAYS.value, rows["way"])
    folder = pathlib.Path(_WORKDIR.value)
    with files.on_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "heads.md").write_text(page, encoding="utf-8")
    told: dict[str, Any] = {"methods": len(rows), "tables": str(folder / "heads.md")}
    for measure, (_, name) in _MEASURES.items():
        figures.save(folder / name, draw, rows, ways, measure)
        told[measure] = str(folder / name)
    print(json.dumps(told))


def _chosen(flag: str, asked: list[str], run: pd.Series) -> list[str]:
    """Returns the names asked for, or all; raises UserError for unknown ones."""
    known = list(run.unique())
    if unknown := sorted({*asked} - {*known}):
        raise UserError(
            f"--{flag}={unknown[0]}: no run has it; these have {', '.join(known)}"
        )
    return asked or known


def table(sources) -> pd.DataFrame:
    """Returns a row per method: `_METHOD`, `found` in percent, `nats`, `kl`, `model`.

    Raises:
      UserError: a run whose full cache finds nothing, a method that two runs have, or
        none that keeps a share.
    """
    rows = []
    for source in sources:
        full = groups.full_cache(source.records)
        if not full.get("score"):
            raise UserError(f"{source.path} has no full cache that finds anything")
        rows += [_row(each, full) for each in source.records if _is_compared(each)]
    if not rows:
        raise UserError(
            "no method keeps a share of its prompts and tells its distance from the "
            "full cache: name runs of configs/heads.py"
        )
    frame = pd.DataFrame(rows)
    if twins := frame[frame.duplicated(_METHOD)].to_dict("records"):
        twin = twins[0]
        raise UserError(
            f"two runs have {twin['rule']}, {twin['way']} with {twin['share']:.1%} of "
            f"{twin['length']} tokens: name one of them"
        )
    return frame


def _is_compared(record: Record) -> bool:
    """Returns whether the budget is a share and the predictions were compared."""
    return bool(record.get("budget_share")) and record.get("kl") is not None


def _row(record: Record, full: Record) -> dict[str, Any]:
    rule, name = groups.series(record), record["method"]
    return {
        "rule": rule,
        "way": name.removeprefix(f"{rule}, "),
        "length": max(t["most_prompt_tokens"] for t in record["tasks"].values()),
        "share": record["budget_share"],
        "found": 100 * record["score"] / full["score"],
        "nats": record["loss"] - record["reference_loss"],
        "kl": record["kl"],
        "model": record["model"],
    }


def as_markdown(rows: pd.DataFrame, title: str) -> str:
    """Returns a page with a table per length and share, policies by rules."""
    rules = list(rows["rule"].unique())
    ways = list(dict.fromkeys([*_WAYS.default, *rows["way"]]))
    told = [f"# {title}", _HOW_TO_READ]
    for (length, share), some in rows.groupby(["length", "share"], sort=True):
        cells = {(each["rule"], each["way"]): each for _, each in some.iterrows()}
        found = some.groupby("rule")["found"]
        most = found.max()[found.count() > 1]
        run = [way for way in ways if way in {*some["way"]}]
        body = [
            [way, *(_cell(cells.get((rule, way)), most.get(rule)) for rule in rules)]
            for way in run
        ]
        told.append(f"## {100 * share:g}% of {length:,} tokens")
        told.append(grids.markdown(grids.Table(["", *rules], body)))
    return "\n\n".join(map(str.strip, told)) + "\n"


def _cell(row: pd.Series | None, most: float | None) -> str:
    if row is None:
        return ""
    found = f"{row['found']:.0f}%"
    if row["found"] == most:
        found = f"**{found}**"
    return f"{found}; {row['nats']:.3f}, {row['kl']:.3f}"


def draw(rows: pd.DataFrame, ways: Sequence[str], measure: str) -> Any:
    """Draws a panel per policy and prompt length, with a line per budget rule."""
    rules = list(rows["rule"].unique())
    lengths, shares = (sorted(rows[each].unique()) for each in ("length", "share"))
    looks = list(map(figures.joined, figures.marks_of(ways)))
    size = max(7.5, 2.8 * len(rules)), 1.2 + 2.3 * len(lengths)
    figure = figures.figure_about(size, " / ".join(rows["model"].unique()))
    grid = figure.subplots(
        *(len(lengths), len(rules)), sharex=True, sharey=True, squeeze=False
    )
    cells = rows.set_index(_METHOD)[measure]
    for length, line in zip(lengths, grid, strict=True):
        for rule, axes in zip(rules, line, strict=True):
            for way, how in zip(ways, looks, strict=True):
                found = cells.reindex([(rule, way, length, share) for share in shares])
                axes.plot(shares, found, **how)
        line[0].set_ylabel(f"{length:,} tokens")
    for rule, axes in zip(rules, grid[0], strict=True):
        axes.set_title(rule, loc="left", fontweight="bold")
    axes = grid[0, 0]
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{100 * share:g}" for share in shares])
    axes.minorticks_off()
    if measure == "kl":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    for axes in grid[-1]:
        axes.set_xlabel("pairs that stay, %")
    figure.supylabel(_MEASURES[measure][0], fontsize=11)
    figures.legend(figure, looks, ways)
    return figure


if __name__ == "__main__":
    command.run(main)
