"""Joins runs in one report: the command `kvjax report`."""

from kvjax.cli import report

if __name__ == "__main__":
    report.start()
