"""Decoding with pairs in fewer bits, raced."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "experiments/bench_codecs.py"


@pytest.mark.slow
def test_rows_are_raced_and_as_many_bytes():
    asked = "--batch=4", "--slots=64", "--repeats=2", "--steps=2", "--layers=2"
    command = sys.executable, str(SCRIPT), *asked, "--codecs=int8"
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    plain, coded, more = (told[x] for x in ("identity", "int8", "int8, equal bytes"))
    assert (plain["rows"], coded["rows"], more["rows"]) == (4, 4, 15)  # 516 / 136
    assert coded["aliased MiB"] == pytest.approx(plain["aliased MiB"] / 3.8, rel=0.02)
    assert more["aliased MiB"] == pytest.approx(plain["aliased MiB"], rel=0.03)
    assert coded["of identity"] == pytest.approx(coded["ms"] / plain["ms"])


def test_an_unknown_codec_is_refused():
    command = sys.executable, str(SCRIPT), "--codecs=int3"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "codec 'int3' is unknown" in done.stderr
    assert "Traceback" not in done.stderr
