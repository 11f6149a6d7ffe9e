"""Runs on disk, as they are joined."""

import pathlib

import pytest
from testing.records import SPEEDS, task_run

from kvjax.evaluation.report.records import append_record


@pytest.fixture
def workdirs(tmp_path, monkeypatch):
    """Three runs: two tasks of one model, and throughput."""
    monkeypatch.chdir(tmp_path)
    members = {
        "one": task_run("xsum", 0.5, 0.4, 0.3, 0.2),
        "two": task_run("needle", 1.0, 0.75, 0.5),
        "speed": SPEEDS,
    }
    for name, records in members.items():
        pathlib.Path(name).mkdir()
        for each in records:
            append_record(pathlib.Path(name) / "records.jsonl", each)
    return list(members)
