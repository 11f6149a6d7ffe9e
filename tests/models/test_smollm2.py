"""The real model: greedy tokens against transformers, and one needle run, short."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from conftest import often

import kvjax
from kvjax import policies
from kvjax.evaluation.tasks import needle, text

pytestmark = [pytest.mark.model, pytest.mark.e2e]
GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "smollm2.json").read_text()
)


def test_full_cache_is_transformers(smollm2):
    """Five prompts in one ragged batch, 32 greedy tokens each, token for token."""
    prompts = [prompt["ids"] for prompt in GOLDEN["prompts"]]
    done = kvjax.generate(smollm2, prompts, max_new_tokens=32, ignore_eos=True)
    assert [c.tokens for c in done] == [p["greedy"] for p in GOLDEN["prompts"]]


def test_needle_is_found_with_half_the_pairs(smollm2):
    """Short form of the quickstart: 400 tokens, 192 slots."""
    examples = needle.examples(
        smollm2.tokenizer, 4, 400, (0.2, 0.5, 0.8), 0, text.haystack()
    )
    done = kvjax.generate(
        smollm2,
        [example.tokens for example in examples],
        policy=policies.key_diff(),
        budget=192,
        max_new_tokens=8,
    )
    found = [
        needle.grade(example, c.text) for example, c in zip(examples, done, strict=True)
    ]
    assert sum(found) >= 3
    assert all(
        len(head) <= 192 for c in done for layer in c.kept_positions for head in layer
    )
    assert np.isfinite(jax.device_get(smollm2.params["final_norm"])).all()


@pytest.mark.parametrize("layers", often([4, 30], [4]))
def test_kernels_generate_the_same(smollm2, layers):
    """Golden prompts through the interpreted TPU kernels: the reference's tokens.

    The longest is evicted from; the decode steps write with the kernel. To interpret
    every layer takes a minute; the first few make no sense, but the same tokens.
    """
    model = smollm2._replace(
        spec=dataclasses.replace(smollm2.spec, num_layers=layers),
        params=smollm2.params | {"layers": smollm2.params["layers"][:layers]},
    )
    prompts = [prompt["ids"] for prompt in GOLDEN["prompts"]]
    done = [
        kvjax.generate(
            model,
            prompts,
            policy=policies.average_attention(),
            budget=128,
            max_new_tokens=12,
            ignore_eos=True,
            implementation=name,
        )
        for name in ("reference", "pallas_tpu_interpret")
    ]
    assert [c.tokens for c in done[0]] == [c.tokens for c in done[1]]
