"""A short prompt in a batch with long ones keeps what it keeps alone."""

import functools
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from conftest import tiny_model

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT / "experiments"))

import padding  # noqa: E402

pytestmark = pytest.mark.e2e

LENGTHS, SLOTS, NEW = (60, 100), 40, 4  # snapkv pins 32 of the slots


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1)


@pytest.fixture(scope="module")
def prompts():
    words = np.random.default_rng(0).integers(0, 50, 320).tolist()
    return padding.cut(words, LENGTHS, 2)


@pytest.mark.parametrize("name", ["snapkv", "tova", "key_diff", "expected_attention"])
def test_shorter_rows_of_kvjax(model, prompts, name):
    run = functools.partial(padding.kvjax_rows, model, padding.policy_of(name), NEW)
    short, long = prompts
    batch = run(short + long, SLOTS)[: len(short)]
    found = padding.measure(batch, padding.apart(run, short, SLOTS))
    assert found["pads_kept_share"] == 0
    assert found["kept_real_min"] == SLOTS
    assert found["agreement_min"] == 1
    assert found["same_tokens"] == found["rows"] == 2


def test_measure_counts_what_it_should():
    """Two heads of four slots; the batch lost one pair to padding, one to another."""
    alone = padding.Row([[[0, 1, 2, 3], [4, 5, 6, 7]]], [9, 9])
    batch = padding.Row([[[0, 1, 2, padding.PAD], [4, 5, 6, 8]]], [9, 8], [9, 9])
    assert padding.measure([batch], [alone]) == {
        "pads_kept_share": 0.125,
        "kept_real_min": 3,
        "kept_real_mean": 3.5,
        "agreement": 0.75,
        "agreement_min": 0.75,
        "same_tokens": 0,
        "rows": 1,
        "same_tokens_loop": 1,
    }


def test_records_and_table(prompts):
    """A side that pads, and a side that does not, through everything but the models."""

    def pads(batch, slots):
        width = max(map(len, batch))
        first = [0 if len(prompt) == width else padding.PAD for prompt in batch]
        return [padding.Row([[[p, *range(1, slots)]]], [p], [p]) for p in first]

    def exact(batch, slots):
        return [padding.Row([[list(range(slots))]], [0]) for _ in batch]

    records, checks = padding.compare(
        "tova", prompts, {"<|a|>": pads, "b": exact}, exact, True
    )
    assert [(r["library"], r["slots"], r.get("pad")) for r in records] == [
        ("kvpress", 50, "<|a|>"),
        ("kvpress", 50, "b"),
        ("kvjax", 50, None),
        ("kvjax", 30, None),
    ]
    assert [r["pads_kept_share"] for r in records] == [0.02, 0, 0, 0]
    assert checks["without_padding"] == {"agreement": 1, "same_tokens": 2, "rows": 2}
    assert checks["longer_row"] == {"agreement": 1, "same_tokens": 1, "rows": 1}
    header, _, line = padding.table(records).splitlines()
    assert "kvpress, a / b | kvjax" in header
    assert line == (
        "| TOVA | 2% / 0% | 0% | 98% / 100% | 100% | 0 of 2 / 2 of 2 | 2 of 2 |"
    )


def test_recorded_figures():
    """What the documentation shows: every policy, and no padding in ours."""
    found = json.loads((ROOT / "docs/data/padding.json").read_text())
    records = found["records"]
    assert {r["policy"] for r in records} == set(padding.LABELS)
    ours = [r for r in records if r["library"] == "kvjax"]
    assert all(r["pads_kept_share"] == 0 and r["agreement"] == 1 for r in ours)
    assert len(padding.table(records).splitlines()) == 2 + len(padding.LABELS)


def test_without_the_other_side(tmp_path):
    """Exit code 2, one line, no traceback."""
    arguments = [f"--baseline_python={tmp_path / 'none'}", f"--workdir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "experiments/padding.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: --baseline_python:")
