"""Files of records: lines that come back, torn and old ones, how they were made."""

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
    is_torn,
    provenance,
    read_records,
    upgraded,
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
    assert read_records(path) == [FULL] and is_torn(path)
    append_record(path, RECORDS[1])
    assert read_records(path) == RECORDS[:2] and not is_torn(path)


def test_a_last_line_without_its_line_break_is_kept(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(FULL))
    assert read_records(path) == [FULL]
    append_record(path, RECORDS[1])
    assert read_records(path) == RECORDS[:2]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{}\n{"a"\n{}\n')
    with pytest.raises(UserError, match=r"records\.jsonl, line 2"):
        read_records(path)


def test_a_record_says_how_it_was_made(monkeypatch):
    monkeypatch.setattr("sys.argv", ["experiments/run.py", "--workdir=my runs", "-q"])
    made = provenance()["provenance"]
    assert made["command"] == "python experiments/run.py '--workdir=my runs' -q"
    for launcher in ("ipykernel_launcher.py", "colab_kernel_launcher.py"):
        monkeypatch.setattr("sys.argv", [f"/lib/{launcher}", "-f", "/tmp/x.json"])
        assert provenance()["provenance"]["command"] == "a notebook"
    monkeypatch.setattr("sys.argv", [""])  # Python's own prompt
    assert provenance()["provenance"]["command"] == "python ''"
    assert made["versions"]["kvjax"] == kvjax.__version__
    assert made["versions"]["jax"] == jax.__version__


OLD = {  # a line of the first format
    "method": "key_diff, 50%",
    "label": "key_diff",
    "schedule": "prefill+decode",
    "budget": 512,
    "rope": "slot",
    "batch": 10,
    "batch_limit": "prompts",
    "tasks": {
        "needle": {
            "metric": "accuracy",
            "metrics": {"accuracy": 1.0},
            "score": 1.0,
            "examples": 2,
            "cells": [{"depth": 0.5, "score": 1.0, "examples": 2}],
        }
    },
    "accuracy": 1.0,
    "examples": 2,
    "tokens_per_s": 3.0,
    "kv_bytes_per_row": 8,
    "command": "python x.py --peer_python=a",
    "versions": {"jax": "0.10.2"},
}
NEW = {
    "format": 2,
    "experiment": "quality",
    "method": "key_diff, 50%",
    "series": "key_diff",
    "schedule": "prefill_and_decode",
    "budget": 512,
    "budget_share": 0.5,
    "codec": "identity",
    "rope_positions": "cache",
    "batch_size": 10,
    "limited_by": "prompts",
    "tasks": {
        "needle": {
            "metric": "accuracy",
            "metrics": {"accuracy": 1.0},
            "score": 1.0,
            "num_examples": 2,
            "breakdown": [{"depth": 0.5, "score": 1.0, "num_examples": 2}],
        }
    },
    "score": 1.0,
    "num_examples": 2,
    "output_tokens_per_s": 3.0,
    "kv_bytes_peak_per_seq": 8,
    "provenance": {
        "command": "python x.py --baseline_python=a",
        "versions": {"jax": "0.10.2"},
    },
}


def test_records_of_the_first_format_are_upgraded(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(OLD))
    assert read_records(path) == [NEW] == [upgraded(NEW)]
    speed = upgraded({"kind": "throughput", "role": "ed", "schedule": "decode"})
    assert (speed["experiment"], speed["batch_rule"]) == ("throughput", "ed")
    assert speed["schedule"] == "decode_only"
    assert upgraded({"schedule": "full"})["schedule"] == "none"
    assert "experiment" not in upgraded({"method": "A", "task": "x", "examples": [1]})


def test_a_later_format_is_an_error(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"format": FORMAT + 1}))
    with pytest.raises(UserError, match=r"line 1: format 3 is newer than 2"):
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
def test_committed_records_come_in_the_words_of_today(path):
    for record in read_records(path):
        assert record["format"] == FORMAT and "score" in record
        assert record["schedule"] in PHASES
        assert not set(record) & {"accuracy", "batch", "group", "label", "kind", "rope"}
        assert record["provenance"]["versions"]
