"""Runs that are killed, crowded, out of disk or out of time go on as if nothing was."""

import signal
import time

import pytest
from testing import small_runs

from kvjax.evaluation.report.records import read_records

pytestmark = pytest.mark.e2e

# Every look at the clock is an hour before the last one.
CLOCK = """\
import itertools, time

hours = itertools.count()
time.time = lambda: 1.7e9 - 3600 * next(hours)
"""
TIMED = (  # programs of whole models, as only those are timed
    "--config.layerwise=False",
    '--config.methods=({"name": "Full cache"},)',
    "--config.fidelity.num_windows=0",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return small_runs.prepared(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def heeds_interrupts():
    """What is started heeds SIGINT, even where a shell's `&` had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def errors(stderr):
    return [line for line in stderr.splitlines() if line.startswith("error:")]


@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_moments(runs, times):
    assert small_runs.kill(runs, times, seed=times) >= 1


@pytest.mark.usefixtures("heeds_interrupts")
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_end(runs, sign):
    name = sign.name
    process = runs.start(name)
    batches = runs.folder / name / "batches.jsonl"
    while not batches.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(sign)
    _, told = process.communicate()
    assert process.returncode == 130, told
    assert told.endswith("\ninterrupted: run it again to go on from here\n")
    assert "Traceback" not in told
    left = {path.name for path in batches.parent.iterdir()}
    assert "lock" not in left and not [each for each in left if ".part" in each]
    assert runs.end(name).returncode == 0
    runs.check(name)


def test_a_disk_that_fills_up(runs):
    """So many KB fit into a file: not a batch, not the reference, not a picture."""
    for size, file in (
        (0, "lock"),
        (1, "experiment.json"),
        (8, "reference.npy"),
        (60, ".png"),
    ):
        done = runs.end("full_disk", before=f"ulimit -f {size}")
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        (told,) = errors(done.stderr)
        assert file in told and "make room" in told and "cannot be written" in told
    assert runs.end("full_disk").returncode == 0
    runs.check("full_disk")


def test_two_processes_in_one_folder(runs):
    both = [runs.start("crowded"), runs.start("crowded")]
    told = [process.communicate()[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], told
    winner = both[codes.index(0)]
    (line,) = errors(told[codes.index(2)])
    assert f"process {winner.pid} on " in line
    runs.check("crowded")


def test_a_clock_that_goes_backwards(runs):
    clocks = runs.folder / "clocks"
    clocks.mkdir()
    (clocks / "sitecustomize.py").write_text(CLOCK)
    path, began = f"{clocks}:{small_runs.ROOT}", time.perf_counter()
    done = runs.end("clocks/run", *TIMED, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    passed = time.perf_counter() - began
    (record,) = read_records(clocks / "run" / "records.jsonl")
    assert 0 < record["seconds"] < passed and record["decode_tokens_per_s"] > 0
