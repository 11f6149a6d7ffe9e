"""The measure of layers runs, and its figures are the rule's own."""

import json
import pathlib
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments" / "gallery"))

import layer_similarity

from kvjax.cache import budgets
from kvjax.evaluation.report import figures

SCRIPT = pathlib.Path(layer_similarity.__file__)
RNG = np.random.default_rng(0)


def test_cosines_are_those_of_a_block_by_block_prefill(tiny):
    """What a program that measures adds up is the sum over tokens of these."""
    from kvjax import cache
    from kvjax.engine import steps

    prompt = RNG.integers(0, 50, 21).tolist()
    found = layer_similarity.similarities(tiny, prompt)
    assert found.shape == (2, 21) and np.all(np.abs(found) < 1.0001)
    schedule = cache.Schedule("after_prefill", prefill_chunk=8)
    config = cache.make_spec(
        tiny.spec, "recency", 8, schedule, budget_rule=budgets.squeeze()
    )
    state = cache.init(tiny.spec, config, 1, (24, 24))
    tokens, n = np.array([prompt], np.int32), np.array([21], np.int32)
    state, _ = steps.prefill(
        tiny.params, state, tokens, n, spec=tiny.spec, config=config
    )
    np.testing.assert_allclose(state.measured[0], found.sum(1), rtol=1e-4)


def test_table_and_picture(tmp_path):
    means = np.array([0.5, 0.9, 0.92, 0.7])
    found = np.clip(means[None, :, None] + RNG.normal(0, 0.01, (2, 4, 30)), -1, 1)
    layers = layer_similarity.by_layer(found, budgets.squeeze(0.5), 100)
    assert [each["group"] for each in layers] == [1, 3, 3, 2]
    assert [each["pairs"] for each in layers] == [150, 50, 50, 150]
    assert all(each["low"] < each["mean"] < each["high"] for each in layers)
    lines = layer_similarity.table(layers).split("\n")
    assert len(lines) == 2 + 4 and lines[3].endswith("| G3    |    50 |")
    assert layer_similarity.shared(found) == 1.0
    figures.save(tmp_path / "x.png", layer_similarity.draw, found, layers, "model")
    assert min(matplotlib.image.imread(tmp_path / "x.png").shape[:2]) > 300


@pytest.mark.e2e
@pytest.mark.model
@pytest.mark.usefixtures("smollm2")
def test_the_command(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, SCRIPT, f"--workdir={tmp_path}"),
            *("--tokens=64", "--prompts=2"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    sizes = [layer["pairs"] for layer in told["layers"]]
    assert sum(sizes) == 30 * 128
    assert pathlib.Path(told["picture"]).exists()
