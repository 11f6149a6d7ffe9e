"""Files of records: round trips, torn lines, other formats, and provenance."""

import json
import pathlib

import jax
import numpy as np
import pytest
from testing.records import FULL, RECORDS

import kvjax
from kvjax.cache.schedule import PHASES
from kvjax.evaluation.report.records import (
    FORMAT,
    append_record,
    provenance,
    read,
    read_records,
)
from kvjax.types import UserError

DATA = pathlib.Path(__file__).parents[2] / "docs" / "data"


def test_records_come_back(tmp_path):
    path = tmp_path / "records.jsonl"
    assert read_records(path) == []
    for record in RECORDS:
        append_record(path, record)
    assert read_records(path) == RECORDS
    assert path.read_bytes().count(b"\n") == 3


def test_numpy_values_become_numbers(tmp_path):
    path = tmp_path / "records.jsonl"
    append_record(path, {"kl": np.float32(0.5), "budget": np.arange(2)})
    assert read_records(path) == [{"format": FORMAT, "kl": 0.5, "budget": [0, 1]}]
    with pytest.raises(TypeError, match="object"):
        append_record(path, {"kl": object()})


@pytest.mark.parametrize("torn", ['{"method": "Key', '{"m', "{", '{"method": "é'])
def test_a_torn_last_line_is_dropped_and_written_over(tmp_path, torn):
    path = tmp_path / "records.jsonl"
    append_record(path, FULL)
    with path.open("ab") as file:
        file.write(torn.encode()[:15])
    (source,) = read([path])
    assert source.records == read_records(path) == [FULL] and source.torn
    append_record(path, RECORDS[1])
    (source,) = read([path])
    assert source.records == RECORDS[:2] and not source.torn


def test_a_last_line_without_its_line_break_is_kept(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(FULL))
    assert read_records(path) == [FULL]
    append_record(path, RECORDS[1])
    assert read_records(path) == RECORDS[:2]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"format": 2}\n{"a"\n{}\n')
    with pytest.raises(UserError, match=r"records\.jsonl, line 2"):
        read_records(path)


def test_a_record_says_how_it_was_made(monkeypatch):
    monkeypatch.setattr("sys.argv", ["experiments/run.py", "--workdir=my runs", "-q"])
    made = provenance()["provenance"]
    assert made["command"] == "python experiments/run.py '--workdir=my runs' -q"
    monkeypatch.setattr("sys.argv", ["kvjax run", "--workdir=my runs"])
    assert provenance()["provenance"]["command"] == "kvjax run '--workdir=my runs'"
    for launcher in ("ipykernel_launcher.py", "colab_kernel_launcher.py"):
        monkeypatch.setattr("sys.argv", [f"/lib/{launcher}", "-f", "/tmp/x.json"])
        assert provenance()["provenance"]["command"] == "a notebook"
    monkeypatch.setattr("sys.argv", [""])  # Python's own prompt
    assert provenance()["provenance"]["command"] == "python ''"
    assert made["versions"]["kvjax"] == kvjax.__version__
    assert made["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"format": FORMAT + 1}, "format 3 is newer than 2: update kvjax"),
        ({"method": "A"}, "format 1 is older than 2: run it again"),
    ],
)
def test_another_format_is_an_error(tmp_path, record, message):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=f"line 1: {message}"):
        read_records(path)


DEVICES = sorted((DATA / "devices").glob("*.jsonl"))
COMMITTED = sorted(set(DATA.rglob("*.jsonl")) - set(DEVICES))


@pytest.mark.parametrize("path", DEVICES, ids=lambda p: p.stem)
def test_a_devices_lines_say_of_which_run_they_are(path):
    """They are steps of `device_day.py` and the like, no records of methods."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    machines = {line["run"] for line in lines if "machine" in line}
    assert machines == {line["run"] for line in lines}
    assert not [row for line in lines for row in line.get("rows", ()) if "error" in row]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.stem)
def test_committed_records_can_be_read(path):
    for record in read_records(path):
        assert "score" in record and record["schedule"] in PHASES
        assert record["provenance"]["versions"]
