"""The day on a device: a whole one at toy size, and what becomes of each step."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest
from testing import checkpoints, prose
from testing.kernels import by_hand

sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments" / "device"))

import device_day
import device_parts
import device_runs
import kernel_proofs
from device_parts import Part
from device_sizes import FULL, TOY, Absent, Asked
from kernel_proofs import Case

from kvjax.engine import memory
from kvjax.evaluation import roofline, run
from kvjax.evaluation.report.records import append_record
from kvjax.parallel import limits
from kvjax.types import Scoring, UserError

SCRIPT = pathlib.Path(device_day.__file__)
MACHINE = {"platform": "gpu", "device": "Fast 9", "devices": 1, "memory GB": None}


# --- what becomes of steps ------------------------------------------------------------


@pytest.fixture
def day(tmp_path, monkeypatch):
    """A function that runs a day of steps, which take no arguments."""
    monkeypatch.setattr(device_day, "machine", lambda: MACHINE)

    def run_steps(*every, only=None, execute=device_day.inside, together=False):
        def of(step):
            return lambda asked: step()

        made = [
            Part(
                *(f"Part {i}", 1, {name: of(step) for name, step in steps.items()}),
                together=together,
            )
            for i, steps in enumerate(every)
        ]
        monkeypatch.setattr(device_day, "parts", lambda sizes: made)
        return device_day.day(Asked(tmp_path / "day"), only, execute)

    return run_steps


def page(told):
    return pathlib.Path(told["file"]).read_text()


def found(**row):
    return lambda: [row]


def failing(error):
    def step():
        raise error

    return step


def test_a_failure_is_recorded_and_the_others_go_on(day):
    broken = {
        "a": failing(RuntimeError("RESOURCE_EXHAUSTED:\n 9 bytes")),
        "b": found(x=1),
    }
    told = day(broken, {"c": found(off=0.5, error="it is 0.5 off")}, {"d": found(x=2)})
    assert (told["failed"], told["done"], told["left"]) == ([1, 2], [3], [])
    text = page(told)
    assert "- a: **failed**, RuntimeError: RESOURCE_EXHAUSTED: 9 bytes" in text
    assert "- c: **failed**, it is 0.5 off" in text and "| 0.5 |" in text
    mended = {"a": found(x=3), "b": failing(AssertionError("it is done"))}
    told = day(mended, {"c": found(off=0.0)}, {"d": found(x=2)})
    assert told["failed"] == [] and "failed" not in page(told)


def test_goes_on_where_it_was_interrupted(day):
    calls = []

    def counted(name):
        return lambda: calls.append(name) or [{"step": name}]

    first = {"a": counted("a"), "b": failing(KeyboardInterrupt())}
    with pytest.raises(KeyboardInterrupt):
        day(first, {"c": counted("c")})
    told = day({"a": counted("a"), "b": counted("b")}, {"c": counted("c")})
    assert calls == ["a", "b", "c"] and told["done"] == [1, 2]


def test_one_part_alone(day):
    told = day({"a": found(x=1)}, {"b": found(x=2)}, only=2)
    assert (told["done"], told["left"]) == ([2], [1])
    assert "- not run yet: a" in page(told)
    with pytest.raises(UserError, match="--part=3: there are 2"):
        day({"a": found(x=1)}, {"b": found(x=2)}, only=3)


def test_what_is_absent_is_told_and_done_until_it_is_asked_for(day):
    steps = {"a": failing(Absent("no PyTorch here"))}
    told = day(steps)
    assert told["absent"] == [1] and "- a: absent, no PyTorch here" in page(told)
    later = {"a": found(x=1)}
    assert day(later)["absent"] == [1]
    assert day(later, only=1)["done"] == [1]


def test_a_part_ends_with_its_minutes(day, monkeypatch):
    monkeypatch.setattr(device_day, "MINUTES", 0)
    assert day({"a": found(x=1)})["left"] == [1]


def test_a_process_that_dies_is_a_failure(day):
    def execute(asked, number, environment, name, limit):
        if number:
            return "its process ended with code -9"
        return device_day.inside(asked, number, environment, name, limit)

    told = day({"a": found(x=1)}, execute=execute)
    assert told["failed"] == [1] and "ended with code -9" in page(told)


def test_steps_that_time_nothing_run_side_by_side(day):
    """Each waits for the other, and a line of both is there."""
    meeting = threading.Barrier(2, timeout=60)

    def execute(asked, number, environment, name, limit):
        if number:
            meeting.wait()
        return device_day.inside(asked, number, environment, name, limit)

    both = {"a": found(x=1), "b": found(x=2)}
    told = day(both, execute=execute, together=True)
    assert told["done"] == [1]
    assert "| 1   |" in page(told) and "| 2   |" in page(told)


def test_another_device_wants_another_folder(day, monkeypatch):
    day({"a": found(x=1)})
    monkeypatch.setattr(device_day, "machine", lambda: MACHINE | {"device": "Slow 1"})
    for _ in range(2):
        with pytest.raises(UserError, match="results of Fast 9, and this is Slow 1"):
            day({"a": found(x=1)})


def test_a_cpu_is_refused(day, tmp_path, monkeypatch):
    monkeypatch.setattr(device_day, "machine", lambda: MACHINE | {"platform": "cpu"})
    with pytest.raises(UserError, match="needs a GPU or TPU"):
        day({"a": found(x=1)})
    assert not (tmp_path / "day").exists()


# --- kernels --------------------------------------------------------------------------


SMALL = Case(C=40, D=8)
ANSWERED = [
    SMALL,
    dataclasses.replace(SMALL, T=6, live=0.1),
    dataclasses.replace(SMALL, T=6, scoring=Scoring(2.0, 9)),
]


@pytest.mark.parametrize("case", ANSWERED)
def test_the_answer_in_numpy(case):
    given = kernel_proofs.drawn(case)
    assert np.isnan(given.k[given.pos < 0].astype(float)).all()
    out, stats = by_hand(*given, case.scoring)
    answer = kernel_proofs.by_numpy(given, case.scoring)
    np.testing.assert_allclose(answer.pop("out"), out, atol=1e-12)
    for name, value in answer.items():
        np.testing.assert_allclose(value, stats[name], atol=1e-12, err_msg=name)


def test_a_kernel_that_is_off(monkeypatch):
    """By too much; by little; with a NaN; at all."""
    case = Case(C=40, D=8)
    answer = kernel_proofs.by_numpy(kernel_proofs.drawn(case))

    def proved(what, change):
        found = answer | {what: change(answer[what])}
        monkeypatch.setitem(kernel_proofs.WAYS, "attend", lambda *_: found)
        return kernel_proofs.prove(case, "reference")

    assert "error" not in proved("out", lambda x: x + 1e-3)
    assert "the output is 0." in proved("out", lambda x: x + 0.1)["error"]
    assert "last_attn is 0.5 off" in proved("last_attn", lambda x: x + 0.5)["error"]
    nan = proved("attn_sum", lambda x: np.where(x > 0, np.nan, x))
    assert json.loads(json.dumps(nan, allow_nan=False))["statistics off"] == 1e9
    monkeypatch.delitem(kernel_proofs.WAYS, "attend")
    assert kernel_proofs.prove(case, "reference")["error"] == "KeyError: 'attend'"


def test_a_kernel_that_does_not_take_a_case(tmp_path, monkeypatch):
    row = kernel_proofs.prove(Case(C=40, D=8), "pallas_gpu")
    assert "needs a GPU" in row["not taken"] and "error" not in row
    monkeypatch.setitem(kernel_proofs.NAMES, "cpu", "pallas_gpu")
    with pytest.raises(Absent, match="needs a GPU"):
        device_parts.proofs("decode", Asked(tmp_path, toy=True))


# --- runs -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:an eviction leaves 1 of the 65 pairs")
@pytest.mark.parametrize("name", FULL.comparisons)
def test_every_comparison_is_an_experiment(name, monkeypatch):
    monkeypatch.setattr(limits, "host_bytes", lambda: 10**12)
    names = []
    for group in device_runs.METHODS:
        fields = device_runs.fields_of(FULL.comparisons[name], group)
        asked = run.from_config(fields, {})
        asked.check()
        assert asked.tasks[0].num_examples < 300
        names += [method.name.split(",")[0] for method in asked.methods]
    assert set(names) == {"FKV", "ED", "Batch-Max", "Staggered SnapKV"}


def test_runs_of_the_real_model_are_experiments():
    """Whatever is missing; on a GPU the dtype is bfloat16."""
    given = FULL, "smollm2-135m-instruct", "bfloat16"
    asked = run.from_config(device_runs.precision_fields(*given), {})
    asked.check()
    assert [m.name for m in asked.methods] == ["Full cache", "Batch-Max", "KeyDiff"]
    for missing, count in ([], 2), (["kvpress"], 1):
        asked = run.from_config(device_runs.rival_fields(*given, missing), {})
        assert len(asked.baselines) == count
        asked.check()


def test_too_little_memory_is_told(monkeypatch):
    monkeypatch.setattr(memory, "device_memory", lambda: int(30.04e9))
    paper, ours = (FULL.comparisons[n] for n in ("13B, 64 GB", "8B, 4,000 tokens"))
    with pytest.raises(Absent, match="offers 30 GB of the setting's 64"):
        device_runs.memory_gb(paper, 64.0)
    assert device_runs.memory_gb(ours, 48.0) == 30.0
    assert device_runs.memory_gb(paper, 24.0) == 24.0


def test_too_large_a_model_is_told(tmp_path, monkeypatch):
    """Before anything is compiled or drawn."""
    monkeypatch.setattr(memory, "device_memory", lambda: int(30e9))
    given = Asked(tmp_path)
    with pytest.raises(Absent, match=r"8b in bfloat16 takes 33.* GB of 30"):
        device_parts.model("decode step", None, given)
    monkeypatch.setattr(memory, "device_memory", lambda: int(16e9))
    with pytest.raises(Absent, match=r"takes 16\.1 GB of 16"):
        device_parts.peak("FKV", given)
    with pytest.raises(Absent, match=r"takes 16\.1 GB of 16"):
        device_runs.throughput("8B, 4,000 tokens", "staggered", given)


def test_files_and_packages_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    with pytest.raises(Absent, match="with --gguf"):
        device_runs.precision("bfloat16", Asked(tmp_path))
    monkeypatch.setattr(device_runs, "PACKAGES", ("json", "no_such_thing"))
    python = [sys.executable, f"{sys.prefix}/bin/../bin/python"]
    assert [device_runs.lacking(p) for p in python] == [["no_such_thing"]] * 2
    with pytest.raises(Absent, match="lacks no_such_thing: name another"):
        device_runs.rivals(Asked(tmp_path))
    with pytest.raises(Absent, match="does not run"):
        device_runs.rivals(Asked(tmp_path, baseline_python=str(tmp_path / "python")))


def test_devices_that_are_known():
    """Each of their names is one that the rooflines have; others have no rates."""
    assert {name for name, _ in device_parts.KINDS.values()} == set(roofline.DEVICES)
    assert device_parts.published_rates("a CPU") is None
    core = device_parts.published_rates("TPU7x")
    assert 2 * core.bytes_per_s == roofline.device("tpu7x").rates.bytes_per_s


# --- all of it ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny model that has a tokenizer."""
    shape = {"vocab_size": 1024, "max_position_embeddings": 256}
    folder = tmp_path_factory.mktemp("model")
    checkpoints.write_folder(folder, checkpoints.tensors(**shape), **shape)
    prose.make_tokenizer().save_pretrained(folder)
    return folder


def stand_in(python, model, dtype, asked):
    """In the place of `joined`: transformers takes a second for every batch."""
    assert dtype == "float32" and [each["policy"] for each in asked] == [None, None]

    def measure(prompts, new, memory, least, progress):
        rate = {"batch_size": len(prompts), "decode_tokens_per_s": len(prompts) * new}
        return {"method": "transformers full cache", "new_tokens": new, **rate}

    return {"transformers full cache": measure}


@pytest.mark.e2e
def test_a_whole_day(tmp_path, monkeypatch, model):
    """Every part at toy size; a second call has nothing to do."""
    monkeypatch.setattr(roofline, "_COPIED", 2**16)
    rates = roofline.Rates(1e10, 1e11)
    monkeypatch.setattr(roofline, "measured_rates", lambda dtype="": rates)
    monkeypatch.setattr(device_runs, "lacking", lambda python: ["kvpress"])
    monkeypatch.setattr(device_runs, "joined", stand_in)
    asked = Asked(tmp_path, toy=True, gguf=str(model))
    told = device_day.day(asked, None, device_day.inside)
    every = device_parts.parts(TOY)
    assert (told["failed"], told["left"], told["absent"]) == ([], [], [])
    assert told["done"] == list(range(1, len(every) + 1))
    text = page(told)
    for number, part in enumerate(every, 1):
        assert f"## {number}. {part.title}" in text
    for method in ("ED", "Batch-Max, KeyDiff", "Staggered SnapKV"):
        assert f"| {method} " in text
    rivals = [row["method"] for row in device_day.lines_of(asked)[7]["rivals"]["rows"]]
    assert rivals == ["FKV", "transformers full cache", "kvpress is not installed"]
    exact = device_day.lines_of(asked)[6]["float32, exact"]["rows"][0]
    assert exact["nats/token to exact"] == 0 and exact["top-1 as exact"] == 1
    half = device_day.lines_of(asked)[6]["bfloat16"]["rows"][0]
    assert 0 < half["nats/token to exact"] < 1

    def execute(asked, number, environment, name, limit):
        assert name == "machine"
        return device_day.inside(asked, number, environment, name, limit)

    assert device_day.day(asked, None, execute) == told


@pytest.mark.e2e
def test_a_step_in_a_process_of_its_own(tmp_path):
    asked = Asked(tmp_path, toy=True)
    assert device_day.apart(asked, 0, {}, "machine", 300) is None
    assert json.loads((tmp_path / "machine.json").read_text())["platform"] == "cpu"
    assert (
        device_day.apart(asked, 1, {}, "no such", 300)
        == "its process ended with code 1"
    )
    assert "minutes were over" in device_day.apart(asked, 1, {}, "decode", 0.01)


@pytest.mark.e2e
def test_the_command(tmp_path):
    """Its list, its exit codes, and its last line."""

    def ended(*options):
        command = [sys.executable, str(SCRIPT), *options]
        return subprocess.run(command, capture_output=True, text=True)

    idle = "; ".join(
        [
            f"import sys; sys.path.append({str(SCRIPT.parent)!r})",
            "import device_day",
            "from jax._src import xla_bridge",
            "sys.exit(xla_bridge.backends_are_initialized())",
        ]
    )  # or the device's memory would not be the steps'
    assert subprocess.run([sys.executable, "-c", idle]).returncode == 0
    listed = ended("--list")
    assert (
        listed.returncode == 0 and "  1  2 min  Kernels against NumPy" in listed.stdout
    )
    folder = tmp_path / "new"
    refused = ended(f"--workdir={folder}")
    assert refused.returncode == 2 and not folder.exists()
    assert refused.stderr.startswith("error: device_day needs a GPU or TPU")
    folder.mkdir()
    for name in ("decode", "prefill block", "calls"):
        line = {"part": 1, "step": name, "rows": [{"case": name}]}
        append_record(folder / "device.jsonl", line)
    done = ended(f"--workdir={folder}", "--toy", "--part=1")
    last = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and last["done"] == [1] and last["failed"] == []
    line = {"part": 2, "step": next(iter(device_parts.parts(TOY)[1].steps))}
    append_record(folder / "device.jsonl", line | {"rows": [{"error": "off"}]})
    assert ended(f"--workdir={folder}", "--toy", "--part=1").returncode == 1
