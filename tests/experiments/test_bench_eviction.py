"""Slots that are reused raced against a gather, and loops against scans."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "experiments/bench_eviction.py"


@pytest.mark.slow
def test_every_form_is_timed_and_a_long_first_block_takes_more():
    asked = "--batch=1", "--repeats=2", "--steps=2", "--length=256", "--slots=128"
    command = sys.executable, str(SCRIPT), *asked
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    plain, printed = list(told["prefill"].values())[:: len(told["prefill"]) - 1]
    assert printed["temporary MiB"] > 1.5 * plain["temporary MiB"]
    for figures in (told["prefill"], told["decode"]):
        base = figures["slots reused, loop"]
        for row in figures.values():
            assert row["of slots reused, loop"] == pytest.approx(row["ms"] / base["ms"])


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--slots=64", "budget 64 must be larger than the 64 pairs"),
        ("--section=foo", "--section=foo: use some of prefill, decode"),
    ],
)
def test_slips_are_told(flag, words):
    command = sys.executable, str(SCRIPT), flag
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert words in done.stderr
