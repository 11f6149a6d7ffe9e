"""Decoding with heads that keep different numbers of pairs, raced."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "experiments/bench_heads.py"


@pytest.mark.slow
def test_as_many_pairs_are_raced_however_they_are_shared_out():
    asked = "--batch=1", "--repeats=2", "--steps=2", "--multiples=128"
    command = sys.executable, str(SCRIPT), *asked
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    alike, differing = told["all alike"], told["multiples of 128"]
    assert alike["aliased MiB"] == pytest.approx(differing["aliased MiB"], rel=1e-3)
    assert alike["parts"] == 30 < differing["parts"] <= 90
    assert differing["of all alike"] == pytest.approx(differing["ms"] / alike["ms"])


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--policy=tova", ["tova", "looks across the heads"]),
        ("--multiples=abc", ["--multiples=abc: give whole numbers"]),
        ("--multiples=0", ["--multiples=0: give whole numbers, 1 or more"]),
    ],
)
def test_slips_are_told(flag, words):
    command = sys.executable, str(SCRIPT), flag
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words)
