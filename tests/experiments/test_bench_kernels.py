"""The kernel benchmark at shapes a CPU can run: rivals, bandwidth, a whole step."""

import dataclasses
import json
import pathlib
import sys

import pytest
from conftest import tiny_spec

sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments" / "device"))

import bench_kernels
import model_step
import targets

from kvjax.evaluation import roofline

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def _a_small_copy(monkeypatch):
    monkeypatch.setattr(roofline, "_COPIED", 2**16)


def test_times_every_way_that_runs(tmp_path):
    shapes = [bench_kernels.Shape(2, 2, 2, length, 64, 16) for length in (1, 8)]
    rows = bench_kernels.timed(shapes, repeats=3)
    for shape in shapes:
        row = rows[str(shape)]
        assert "needs a TPU" in row["scored failed"]  # ours, here
        for name in ("reference", "reference scored", "xla"):
            assert row[f"{name} us"] > 0 and row[f"{name} of bandwidth"] > 0
    text = bench_kernels.table("here", rows)
    assert all(f"| {shape} |" in text for shape in shapes)
    bench_kernels.plot({"here": rows}, tmp_path / "shares.png")
    assert (tmp_path / "shares.png").stat().st_size > 0
    json.dumps(rows)


def test_bytes_are_counted():
    """K and V once, positions, scores, and little else."""
    shape = bench_kernels.BASE
    pairs = 2 * 64 * 8 * 2048 * 128 * 2
    assert pairs < shape.bytes() < 1.02 * pairs
    assert shape.bytes(bench_kernels.SCORED) - shape.bytes() == 64 * 8 * 2048 * 4


@pytest.mark.parametrize("advance", [model_step.step, model_step.block])
def test_times_a_whole_step(advance):
    spec = dataclasses.replace(tiny_spec(), tie_embeddings=False)
    seconds, read = model_step.timed(spec, 2, 128, 4, None, advance)
    pairs = 2 * spec.num_layers * 2 * spec.num_kv_heads * 128 * spec.head_dim * 2
    assert seconds > 0 and read > pairs


SCHEDULE = """\
   0   :  { %1 = vmatmul.bf16 }
   0x1   : > { %2 sbr.rel (%p1) target = $region7 }
   0x2   : > { vst }
   0x3   : > { vst }
   0x4 PF: > /* Start/End empty region 7 */ { nop }
   0x5   : > { %3 sbr.rel (%p2) target = $region9 }
   0x6   : > { vmatmul.bf16 }
   0x7 PF: > /* Start/End empty region 9 */ { nop }
   0x8   : > { %4 sbr.rel (%p2) target = $region11 }
   0x9   : > { dma.done.wait }
   0xa PF: > /* Start/End empty region 11 */ { nop }
"""


def test_reads_a_schedule():
    """Every step's bundles, and an edge's; a product taken again is not counted."""
    assert targets._executed(SCHEDULE.splitlines()) == (8, 2)


def test_cores_of_the_chips():
    """A v5e is one core of about 1.5 GHz; half of a TPU7x's rates are a core's."""
    assert targets.CHIPS["v5e"].clock == pytest.approx(1.5e9, rel=0.01)
    assert targets.CHIPS["tpu7x"].bandwidth == pytest.approx(3.69e12)
    assert targets.CHIPS["tpu7x"].clock == pytest.approx(2.2e9, rel=0.01)
