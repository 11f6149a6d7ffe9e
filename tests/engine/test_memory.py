"""What generating leaves behind, measured in a process of its own."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
HELD = """
import json, pathlib
from conftest import tiny_model
import kvjax

heads = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
model = tiny_model(num_layers=8, context_length=512, **heads)
prompts, held = [[row] * 200 for row in range(20)], []
for _ in range(4):
    kvjax.generate(model, prompts, max_new_tokens=4, ignore_eos=True)
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    held += [int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS")]
print(json.dumps(held))
"""
STATE = 20 * (8 * 8 * 2) * (256 + 4) * 64 * 4  # bytes of pairs that a call fills


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_state_stays_behind():
    """glibc keeps what one thread has freed, and the next state is another one's."""
    done = subprocess.run(
        [sys.executable, "-c", HELD],
        cwd=ROOT / "tests",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, *later = json.loads(done.stdout.splitlines()[-1])
    assert max(later) - first < STATE / 4
