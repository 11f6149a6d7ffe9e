"""Joins runs: one table of all their tasks, pictures, and a page to hand on.

    python experiments/report.py runs/quality/* runs/batch_max_cpu --workdir=runs/report

Takes folders of runs, or records.jsonl files. Writes report.md, report.html (one file,
no network), tables.tex (booktabs) and pictures into --workdir, prints the tables and,
as the last line on stdout, one JSON object. --leaderboard=docs/leaderboard.md writes
that page of tables instead.
"""

import json
import pathlib
import sys

import command_line
from absl import flags

from kvjax.evaluation import report
from kvjax.types import UserError

_WORKDIR = flags.DEFINE_string("workdir", "runs/report", "Where the report goes.")
_PAGE = flags.DEFINE_string("leaderboard", None, "Write this page, and no report.")


def main(argv):
    sources = report.read(argv[1:])
    for source in sources:
        if source.torn:
            print(
                f"{source.path}: the last line was cut short; left out", file=sys.stderr
            )
    if _PAGE.value:
        text = report.leaderboard(sources)
        _write(pathlib.Path(_PAGE.value), text)
        told = {"leaderboard": _PAGE.value, "runs": [each.path for each in sources]}
    else:
        told = report.write_comparison(sources, _WORKDIR.value)
        print(report.comparison_overview(sources, report.terminal_width()))
        print(f"\n{told['report']}\n")
    print(json.dumps(told))


def _write(path, text):
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--leaderboard={path}: {error.strerror}") from None


if __name__ == "__main__":
    command_line.run(main)
