"""Records that runs write, and the tables, figures and pages made from them.

A run calls `overview`, `summary` and `write_report` with its records. `read` and
`write_comparison` join the records of several runs, and `leaderboard` makes their page.
"""

from kvjax.types import require_extra

require_extra("eval", "pandas", "matplotlib", "markdown_it")  # before they are imported

from kvjax.evaluation.report.grids import terminal_width
from kvjax.evaluation.report.page import (
    comparison_overview,
    leaderboard,
    overview,
    summary,
    write_comparison,
    write_report,
)
from kvjax.evaluation.report.records import read

__all__ = [
    "comparison_overview",
    "leaderboard",
    "overview",
    "read",
    "summary",
    "terminal_width",
    "write_comparison",
    "write_report",
]
