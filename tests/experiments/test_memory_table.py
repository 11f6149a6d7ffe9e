"""Shapes of published models: their parameters, and what their caches take."""

import math
import pathlib
import sys

import jax
import pytest

sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments"))

import memory_table

from kvjax.models import decoder, presets
from kvjax.types import UserError

# Parameters in units of 1e9, as the models' authors count them.
PARAMETERS = {
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.02,
    "llama-2-70b": 68.98,
    "llama-3-8b": 8.03,
    "llama-3.1-8b": 8.03,
    "llama-3-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "mistral-7b": 7.24,
    "mixtral-8x7b": 46.70,
    "phi-3.5-mini": 3.82,
    "qwen2-7b": 7.62,
    "falcon-7b": 6.92,
    "opt-6.7b": 6.66,
    "gpt-neox-20b": 20.55,
}


@pytest.mark.parametrize("name", presets.CONFIGS)
def test_parameters(name):
    shapes = decoder.param_shapes(presets.spec(name))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert count / 1e9 == pytest.approx(PARAMETERS[name], rel=2e-3)


@pytest.mark.parametrize("name", presets.CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pairs_per_token(name, dtype):
    """2 L K D bytes."""
    spec, size = presets.spec(name), {"float32": 4, "bfloat16": 2}[dtype]
    pairs = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * size
    assert memory_table.kv_bytes(spec, dtype) == pairs


def test_published_caches():
    """Llama-2-7B: 0.5 MB per token. Llama-3-70B, 64 rows of 4,096 tokens: 80 GB."""
    small, large = (presets.spec(f"llama-{x}") for x in ("2-7b", "3-70b"))
    assert memory_table.kv_bytes(small, "bfloat16") == 0.5 * 2**20
    assert memory_table.kv_bytes(large, "bfloat16") * 64 * 4096 == 80 * 2**30


def test_batches():
    """What fits is what is left over the bytes of a row, and compression fits more."""
    figures = memory_table.row("llama-2-7b", "bfloat16", 1024)
    left = 80e9 * 0.92 - figures["weights"]
    batch = figures["batch"]["80"]
    positions = 4 * 32 * 32
    assert batch["2048"] == left // (2048 * (0.5 * 2**20 + positions))
    assert batch["kv 1024"] > 1.9 * batch["2048"] > 1.9 * 4 * batch["8192"] > 0
    assert figures["batch"]["24"]["32768"] == 0
    text = memory_table.table({"llama-2-7b": figures})
    assert "| llama-2-7b | 13.5 | 0.500 | 7, 1, -, 15 | " in text


def test_an_unknown_shape():
    with pytest.raises(UserError, match="no shape of 'gpt-4': one of falcon-7b"):
        presets.spec("gpt-4")
