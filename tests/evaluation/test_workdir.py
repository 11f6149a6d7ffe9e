"""A run's workdir: one process at a time, and damaged files are refused."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from kvjax.evaluation import files, quality, run
from kvjax.evaluation.report.records import append_record, read_records
from kvjax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]
HOLD = """
import pathlib, sys
from kvjax.evaluation import files
with files.locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""

FIELDS = {
    "model": "none",
    "dtype": "float32",
    "memory_gb": 1.0,
    "seed": 0,
    "haystack": "",
}
ASKED = {
    "quality": {
        "methods": [{"name": "Full cache"}],
        "tasks": [{"name": "needle", "num_examples": 1}],
        "fidelity": {"num_windows": 2, "prompt_tokens": 8, "continuation_tokens": 3},
    },
    "throughput": {
        "methods": ["FKV"],
        "num_examples": 1,
        "max_new_tokens": 1,
        "min_timed_batches": 1,
    },
}
TIMED = {"method": "FKV", "max_new_tokens": 1, "batch_size": 1, "prefill_batch": 1}
SECONDS = {"prefill_seconds": 1.0, "decode_seconds": 1.0, "measured_bytes": None}
GRADED = {"examples": [0], "scores": [{"accuracy": 1.0}], **SECONDS}
BYTES = {"kv_bytes_live": 1, "kv_bytes_allocated": 1}
LINES = {  # whole ones of batches.jsonl: of which experiment, and the line
    "a task's": (
        "quality",
        {"method": "Full cache", "task": "needle", "prompt_tokens": 9, "new_tokens": 1}
        | {**GRADED, **BYTES},
    ),
    "fidelity's": (
        "quality",
        {"method": "Full cache", "task": "fidelity", "loss": 1.0, "kl": 0.0}
        | {"reference_loss": 1.0, "top1_agreement": 1.0},
    ),
    "a timed one": ("throughput", TIMED | GRADED),
    "without memory": ("throughput", TIMED | {"out_of_memory": True}),
}
LACKING = [(kind, field) for kind, (_, line) in LINES.items() for field in line]


@pytest.fixture
def experiment():
    return run.from_config(FIELDS | ASKED["quality"], {})


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of the folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


# --- the lock -------------------------------------------------------------------------


def test_one_process_at_a_time(tmp_path, holder):
    with pytest.raises(UserError) as caught, files.locked(tmp_path):
        pass
    told = str(caught.value)
    assert "another process is at work there: wait for it" in told
    holder.communicate("")
    with files.locked(tmp_path):
        pass


def test_a_folder_may_hold_several_locks(tmp_path):
    with files.locked(tmp_path), files.locked(tmp_path, "a.lock"):
        assert {path.name for path in tmp_path.iterdir()} == {"lock", "a.lock"}
        with (
            pytest.raises(UserError, match="is at work there"),
            files.locked(tmp_path, "a.lock"),
        ):
            pass
    assert not list(tmp_path.iterdir())


def test_a_dead_process_s_lock_is_taken_over(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "lock").exists()
    with files.locked(tmp_path):
        pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_lock_is_let_go_of_after_an_error(tmp_path, error):
    with pytest.raises(error), files.locked(tmp_path):
        raise error
    assert not list(tmp_path.iterdir())


# --- the folder -----------------------------------------------------------------------


def test_nothing_is_left_where_nothing_was_measured(experiment, tmp_path):
    with run.opened(experiment, tmp_path / "runs" / "mine") as folder:
        assert {p.name for p in folder.iterdir()} == {"experiment.json", "lock"}
    assert not list(tmp_path.iterdir())
    with run.opened(experiment, tmp_path / "mine") as folder:
        append_record(folder / "batches.jsonl", {})
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert names == {"experiment.json", "batches.jsonl"}


def test_a_folder_that_was_there_stays(experiment, tmp_path):
    with run.opened(experiment, tmp_path):
        pass
    assert tmp_path.exists()


def test_other_devices_want_another_folder(experiment, tmp_path, monkeypatch):
    """Otherwise one record would mix batches of two devices."""
    with run.opened(experiment, tmp_path) as folder:
        append_record(folder / "batches.jsonl", {})
    with run.opened(experiment, tmp_path):
        pass
    here, path = run._devices(), tmp_path / "experiment.json"
    monkeypatch.setattr(run, "_devices", lambda: "2 x H100")
    words = (
        f"holds results of {here}, and this is 2 x H100: resume it there, name another"
    )
    with pytest.raises(UserError, match=words), run.opened(experiment, tmp_path):
        pass
    path.write_text(json.dumps(dataclasses.asdict(experiment)))  # as it used to be
    with run.opened(experiment, tmp_path):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\xff\n", b"[1]", b"3"])
@pytest.mark.parametrize("name", ["experiment.json", "records.jsonl", "batches.jsonl"])
def test_damaged_files_are_told(experiment, tmp_path, name, content):
    asked = json.dumps(dataclasses.asdict(experiment))
    (tmp_path / "experiment.json").write_text(asked)
    append_record(tmp_path / "batches.jsonl", LINES["a task's"][1])
    (tmp_path / name).write_bytes(content)
    words = r"is damaged.*delete it" if "exp" in name else "line 1 is not a record"
    if name != "experiment.json" and content in (b"", b"{"):
        words = "no model named"  # a kill leaves these: as if they were not there
    with pytest.raises(UserError, match=words) as caught:
        run.run(experiment, tmp_path, lambda *step: None)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value) or "model" in words


@pytest.mark.parametrize(("kind", "field"), LACKING)
def test_a_batch_that_lacks_a_field_is_told(tmp_path, kind, field):
    """A line without a field is an error; complete lines are read."""
    measurement, line = LINES[kind]
    asked = run.from_config(
        {"experiment": measurement} | FIELDS | ASKED[measurement], {}
    )
    question = json.dumps(dataclasses.asdict(asked))
    (tmp_path / "experiment.json").write_text(question)
    append_record(tmp_path / "batches.jsonl", line)
    with pytest.raises(UserError, match="no model named 'none'"):
        run.run(asked, tmp_path, lambda *step: None)
    less = {key: value for key, value in line.items() if key != field}
    append_record(tmp_path / "batches.jsonl", less)
    told = rf"batches\.jsonl, line 2 lacks '{field}': repair or remove it"
    if field == "out_of_memory":
        told = "line 2 lacks 'examples'"
    with pytest.raises(UserError, match=told):
        run.run(asked, tmp_path, lambda *step: None)


def damaged(path, kind):
    good = np.zeros((2, 3, 50), np.float32)
    if kind in ("shape", "type"):
        good = good[:1] if kind == "shape" else good.astype(np.float64)
    np.save(path, good)
    content = path.read_bytes()
    cut = {"empty": b"", "cut": content[:-1], "head": content[:40], "garbage": b"\x80a"}
    path.write_bytes(cut.get(kind, content))


@pytest.mark.parametrize(
    "kind", ["none", "empty", "cut", "head", "garbage", "shape", "type"]
)
def test_a_damaged_reference_is_told(experiment, tmp_path, tiny, kind):
    damaged(tmp_path / "reference.npy", kind)
    setting = run.Setting(experiment, tiny, 0, tmp_path, [], [], {})
    windows = [quality.fidelity.Window((1, 2), (3, 4, 5))] * 2
    if kind == "none":
        assert quality._saved_reference(setting, windows).shape == (2, 3, 50)
        return
    with pytest.raises(UserError, match=r"reference.npy is damaged: delete it"):
        quality._saved_reference(setting, windows)


# --- writing --------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_file_is_whole_or_as_it_was(tmp_path, error):
    path = tmp_path / "a.json"
    path.write_text("before")
    wanted = UserError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(wanted) as caught, files.written(path) as partial:
        partial.write_text("half")
        raise error
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    if wanted is UserError:
        assert "a.json cannot be written: No space left; make room" in str(caught.value)


def test_a_torn_line_that_is_long_is_replaced(tmp_path):
    path = tmp_path / "records.jsonl"
    append_record(path, {"method": "first"})
    with path.open("ab") as file:
        file.write(b'{"text": "' + b"y" * 100_000)
    append_record(path, {"method": "last"})
    assert [record["method"] for record in read_records(path)] == ["first", "last"]
