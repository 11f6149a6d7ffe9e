"""Joins runs: one table of all their tasks, pictures, and a page to hand on.

    kvjax report runs/quality/* runs/batch_max_cpu --workdir=runs/report

Takes folders of runs, or records.jsonl files. Writes report.md, report.html (one file,
no network), tables.tex (booktabs) and pictures into --workdir, prints the tables and,
as the last line on stdout, one JSON object. --leaderboard=docs/leaderboard.md writes
that page of tables instead.
"""

import json
import pathlib
import sys

from absl import flags

from kvjax.cli import command
from kvjax.evaluation import report
from kvjax.types import UserError

_WORKDIR = flags.DEFINE_string("workdir", "runs/report", "The report's folder.")
_PAGE = flags.DEFINE_string(
    "leaderboard", None, "The file of a leaderboard, written instead of a report."
)


def start() -> None:
    """Runs the command with the flags of `sys.argv`."""
    command.run(main, parse=command.parser(__name__))


def main(argv: list[str]) -> None:
    """Writes the report, or the leaderboard, of the runs that `argv` names."""
    sources = report.read(argv[1:])
    for source in sources:
        if source.torn:
            print(
                f"{source.path}: the last line was cut short; left out", file=sys.stderr
            )
    if _PAGE.value:
        _write(pathlib.Path(_PAGE.value), report.leaderboard(sources))
        runs = [source.path for source in sources]
        summary = {"leaderboard": _PAGE.value, "runs": runs}
    else:
        summary = report.write_comparison(sources, _WORKDIR.value)
        print(report.comparison_overview(sources, report.terminal_width()))
        print(f"\n{summary['report']}\n")
    print(json.dumps(summary))


def _write(path: pathlib.Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--leaderboard={path}: {error.strerror}") from None
