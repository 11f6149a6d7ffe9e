"""The Llama forward pass against transformers (golden files) and its causality."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from kvjax.models import decoder, weights

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def causal_attend(layer, q, k, v, ops, cache):
    """Computes full causal attention without a cache: [B, K, G, T, D]."""
    q, k = ops.apply_rope(q), ops.apply_rope(k)
    scores = jnp.einsum("bkgtd,bksd->bkgts", q, k) * q.shape[-1] ** -0.5
    length = q.shape[-2]
    seen = jnp.tril(jnp.ones((length, length), bool))[None, None, None]
    probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bksd->bkgtd", probs, v), cache


def full_logits(model, ids):
    """Returns logits [B, T, V] of whole prompts."""
    ids = jnp.asarray(ids, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)

    @jax.jit
    def run(params):
        hidden, _ = decoder.forward(
            params, model.spec, ids, positions, None, causal_attend
        )
        flat = hidden.reshape(-1, model.spec.model_dim)
        return decoder.logits(params, flat, model.spec).reshape(*ids.shape, -1)

    return run(model.params)


@pytest.fixture(params=["mha", "gqa_tied", "mqa"])
def tiny(request, tmp_path):
    """A model, prompts, and transformers' logits of them."""
    golden = dict(np.load(GOLDEN / f"llama_{request.param}.npz"))
    (tmp_path / "config.json").write_text(str(golden.pop("config")))
    ids, expected = golden.pop("ids"), golden.pop("logits")
    safetensors.numpy.save_file(golden, tmp_path / "model.safetensors")
    return weights.load(tmp_path), ids, expected


def test_tiny_models_match_transformers(tiny):
    model, ids, expected = tiny
    assert model.tokenizer is None
    kinds = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
        for tree in (model.params, decoder.param_shapes(model.spec))
    ]
    assert kinds[0] == kinds[1]
    np.testing.assert_allclose(full_logits(model, ids), expected, atol=2e-5, rtol=0)


def test_forward_is_causal(tiny):
    model, ids, _ = tiny
    length = ids.shape[1]
    rows = np.concatenate([ids[:1], ids[:1].repeat(length, 0)])
    places = np.arange(length)
    rows[places + 1, places] ^= 1  # row t + 1 differs from row 0 at place t
    found = np.asarray(full_logits(model, rows))
    moved = np.abs(found[1:] - found[:1]).max(-1)  # [changed place, place]
    assert (moved[np.tril_indices(length, -1)] < 1e-5).all()
    assert (moved[np.triu_indices(length)] > 1e-4).all()


@pytest.fixture(scope="module")
def golden():
    return json.loads((GOLDEN / "smollm2.json").read_text())


@pytest.mark.model
def test_smollm2_tokens_match_transformers(smollm2, golden):
    for prompt in golden["prompts"]:
        assert smollm2.tokenizer(prompt["text"]).input_ids == prompt["ids"]
        plain = smollm2.tokenizer.decode(prompt["ids"])
        assert plain == prompt["text"], prompt["kind"]
    chat = next(p for p in golden["prompts"] if p["kind"] == "chat")
    rendered = smollm2.tokenizer.apply_chat_template(
        chat["messages"], tokenize=False, add_generation_prompt=True
    )
    assert rendered == chat["text"]


@pytest.mark.model
def test_smollm2_logits_match_transformers(smollm2, golden):
    # Causal, so that a prompt may be followed by anything: two lengths to compile.
    short = [prompt for prompt in golden["prompts"] if len(prompt["ids"]) < 100]
    long = [prompt for prompt in golden["prompts"] if len(prompt["ids"]) >= 100]
    for prompts in (short, long):
        width = max(len(prompt["ids"]) for prompt in prompts)
        ids = [prompt["ids"] + [0] * (width - len(prompt["ids"])) for prompt in prompts]
        rows = np.asarray(full_logits(smollm2, ids))
        for row, prompt in zip(rows, prompts, strict=True):
            last = row[len(prompt["ids"]) - 1]
            shown = [int(key) for key in prompt["logits"]]
            np.testing.assert_allclose(
                last[shown],
                list(prompt["logits"].values()),
                atol=1e-3,
                rtol=0,
                err_msg=prompt["kind"],
            )
            assert last.argmax() == prompt["greedy"][0]


@pytest.mark.model
def test_smollm2_splits_digits_one_by_one(smollm2):
    def pieces(text):
        return smollm2.tokenizer.convert_ids_to_tokens(
            smollm2.tokenizer(text).input_ids
        )

    assert pieces("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    # The digit is cut off first, so the two spaces before it stay together.
    assert pieces("a  1") == ["a", "ĠĠ", "1"]
