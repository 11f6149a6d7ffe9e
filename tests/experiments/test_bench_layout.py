"""The benchmark of the cache's layout runs: one way of each section, small."""

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_runs():
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "experiments" / "bench_layout.py"),
            *("--section=layers,append", "--only=a tuple, scatter|at\\[b, k, slot"),
            *("--batch=1", "--slots=128", "--repeats=2"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert {"a decode step", "append", "append and attend"} <= set(figures)
    assert figures["a decode step"]["loop over a tuple, scatter"]["ms"] > 0
