"""The benchmark of loading runs, small, and what it measures is within bounds."""

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e

ROOT = pathlib.Path(__file__).parents[2]
NOISE = 8e6  # allocators round, threads have stacks


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_host_holds_one_shard_and_one_tensor_at_most():
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "experiments" / "bench_loading.py"),
            *("--gb=0.08", "--shard_gb=0.012", "--width=512", "--vocab=4000"),
            *("--dtypes=bfloat16", "--repeats=1"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    made, ways = found["checkpoint"], found["cases"]["bfloat16"]
    assert made["bytes"] > 3 * (made["shard"] + made["tensor"])
    for run in ways.values():
        assert run["params"] == made["bytes"] // 2
    straight = ways["no copy"]
    assert straight["params"] * 0.9 < straight["rss"]  # it does see what is loaded
    most = made["shard"] + made["tensor"] + NOISE  # the look for NaN has programs
    assert straight["rss"] - straight["params"] < most
    assert straight["file"] < NOISE
