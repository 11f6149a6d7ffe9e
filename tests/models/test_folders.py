"""Tests of Hugging Face folders: loaded params, and folders that are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import checkpoints
from testing.checkpoints import (
    EMBED,
    HEAD,
    assert_same_params,
    halves,
    one_line,
    write_folder,
    write_shards,
)

from kvjax.models import weights
from kvjax.models.weights import hub
from kvjax.models.weights import tensors as files
from kvjax.types import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    return checkpoints.cache(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def tensors():
    return checkpoints.tensors()


def refused(path, message):
    """Checks that a load fails with one line that has `message` and the path."""
    with pytest.raises(UserError, match=message) as error:
        weights.load(path)
    said = one_line(error)
    assert str(path) in said
    return said


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tensors):
    """Returns the params of the checkpoint in one file, in float32."""
    folder = write_folder(tmp_path_factory.mktemp("whole"), tensors)
    return weights.load(folder).params


def test_params_hold_the_tensors(whole, tensors):
    """Entry by entry: whose row and column of which tensor stands where."""
    layer, name = whole["layers"][1], "model.layers.1.self_attn.{}_proj.weight"
    q, k, v = (tensors[name.format(part)] for part in "qkv")
    # 2 KV heads of 8 channels; each: 2 query heads, its key, its value.
    rows = [q[0:16], k[0:8], v[0:8], q[16:32], k[8:16], v[8:16]]
    np.testing.assert_array_equal(layer["qkv"], np.concatenate(rows))
    gate, up = (tensors[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    np.testing.assert_array_equal(layer["gate_up"], np.concatenate([gate, up]))
    np.testing.assert_array_equal(layer["out"], tensors[name.format("o")])
    np.testing.assert_array_equal(whole["embed"], tensors[EMBED])


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("asked", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_shards_of_every_dtype(tmp_path, tensors, stored, asked):
    """Numbers larger than a block are read in blocks: so small ones here."""
    cast = {name: array.astype(stored) for name, array in tensors.items()}
    path = write_shards(tmp_path / "shards", halves(cast))
    again = weights.load(
        write_folder(
            tmp_path / "one", {n: a.astype(np.float32) for n, a in cast.items()}
        )
    )
    wanted = jax.tree.map(lambda leaf: leaf.astype(asked), again.params)
    assert_same_params(weights.load(path, asked).params, wanted, rtol=0)


def test_tensors_of_many_blocks(tmp_path, tensors, whole, monkeypatch):
    monkeypatch.setattr(files, "_BLOCK", 100)  # divides no tensor
    found = weights.load(write_folder(tmp_path / "a", tensors))
    assert_same_params(found.params, whole, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, r"lacks 8 tensors, .*q_proj\.bias"),
        ({"mlp_bias": True}, r"lacks 6 tensors, .*gate_proj\.bias"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "{'rope_type': 'ntk'"),
        ({"rope_scaling": {"type": "linear", "odd": 2}}, "'linear', 'odd': 2"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "without low_freq_factor"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "without short_factor"),
        ({"rope_parameters": "linear"}, "rope_parameters = 'linear'"),
        ({"head_dim": 5}, "head_dim 5"),
        ({"num_key_value_heads": 3}, "3 KV heads for 4 query heads"),
        ({"num_attention_heads": "4"}, "num_attention_heads = '4'"),
        ({"hidden_size": ...}, "has no hidden_size"),
        ({"architectures": ["BertModel"]}, r"\['BertModel'\] .*: kvjax knows Falc"),
        ({"architectures": ["MistralForCausalLM"]}, "model_type = 'llama' .* two fam"),
        ({"model_type": "mistral"}, "model_type = 'mistral' in config.json, which are"),
        (
            {"architectures": ..., "model_type": "gpt2"},
            "model_type 'gpt2' .* knows Fal",
        ),
        ({"architectures": None, "model_type": ...}, "architectures None and model_ty"),
        ({"num_hidden_layers": 3}, r"lacks 9 tensors, model\.layers\.2"),
        ({"num_hidden_layers": 1}, "has 9 tensors that"),
        ({"tie_word_embeddings": False}, r"lacks 1 tensors, lm_head\.weight"),
        ({"intermediate_size": 65}, r"shape \(64, 32\), .* \(65, 32\)"),
    ],
)
def test_config_that_we_do_not_compute_is_refused(tmp_path, tensors, changes, message):
    path = write_folder(tmp_path / "folder", tensors, **changes)
    with pytest.raises(UserError, match=message) as error:
        weights.load(path)
    assert str(path) in one_line(error)


def test_neutral_config_is_accepted(tmp_path, tensors):
    changes = {
        "attention_bias": False,
        "mlp_bias": None,
        "hidden_act": "silu",
        "pretraining_tp": 1,
        "rope_theta": ...,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "transformers_version": "5.0",
        "bos_token_id": 1,
    }
    plain = weights.load(write_folder(tmp_path / "plain", tensors)).spec
    path = write_folder(tmp_path / "folder", tensors, **changes)
    assert weights.load(path).spec == dataclasses.replace(plain, name="folder")


def test_a_model_type_does_without_architectures(tmp_path, tensors, whole):
    path = write_folder(tmp_path / "a", tensors, architectures=..., model_type="llama")
    assert_same_params(weights.load(path).params, whole, rtol=0)


def test_a_head_beside_a_tied_embedding(tmp_path, tensors):
    same = {**tensors, HEAD: tensors[EMBED]}
    assert "head" not in weights.load(write_folder(tmp_path / "a", same)).params
    other = {**tensors, HEAD: 2 * tensors[EMBED]}
    with pytest.raises(UserError, match="tie_word_embeddings is true"):
        weights.load(write_folder(tmp_path / "b", other))


@pytest.mark.parametrize(("kind", "name"), [(np.int8, "I8"), (np.float64, "F64")])
def test_tensors_of_other_dtypes_are_refused(tmp_path, tensors, kind, name):
    other = {**tensors, "model.norm.weight": np.ones(32, kind)}
    refused(write_folder(tmp_path / "a", other), rf"norm\.weight .* dtype {name}: only")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {n: a for n, a in t.items() if n != NORM},
            f"lacks 1 .*{NORM} first",
        ),
        (lambda t: {**t, "x.weight": t[NORM]}, r"1 tensors that .* use, x\.weight"),
        (lambda t: {**t, NORM: t[NORM][:31]}, r"has shape \(31,\), .* for \(32,\)"),
    ],
    ids=["missing", "extra", "shape"],
)
def test_other_tensors_than_the_configuration_asks_for(
    tmp_path, tensors, change, message
):
    refused(write_folder(tmp_path / "one", change(tensors)), message)
    refused(write_shards(tmp_path / "two", halves(change(tensors))), message)


@pytest.mark.parametrize("length", [4, 500, -1])
def test_truncated_files_are_refused(tmp_path, tensors, length):
    one = write_folder(tmp_path / "a", tensors) / "model.safetensors"
    two = write_shards(tmp_path / "b", halves(tensors)) / "b.safetensors"
    for file in (one, two):
        file.write_bytes(file.read_bytes()[:length])
        said = refused(file.parent, "truncated or damaged")
        assert str(file) in said


def test_a_file_that_is_cut_while_it_is_read(tmp_path, tensors):
    file = write_folder(tmp_path / "a", tensors) / "model.safetensors"
    last = max(files.read_header(file).values(), key=lambda tensor: tensor.start)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match="was cut short"):
        last.read(jnp.float32)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {EMBED: "c.safetensors"}}, r"c\.safetensors, which is missing"),
        (
            {"weight_map": {EMBED: "../a.safetensors"}},
            r"'\.\./a.safetensors', which is not",
        ),
        ({"weight_map": {EMBED: "a.bin"}}, r"'a\.bin', which is not a safetensors"),
        ({"weight_map": {EMBED: 3}}, "'3', which is not a safetensors file"),
        ({"weight_map": {EMBED: "a.safetensors"}}, r"lacks \d+ tensors"),
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": 3}, "no weight_map"),
        ({}, "no weight_map"),
        ([], "does not hold a JSON object"),
    ],
)
def test_an_index_that_is_wrong(tmp_path, tensors, index, message):
    refused(write_shards(tmp_path / "a", halves(tensors), index), message)


def test_an_index_that_is_not_json(tmp_path, tensors):
    path = write_shards(tmp_path / "a", halves(tensors))
    (path / "model.safetensors.index.json").write_text("{")
    refused(path, "not valid JSON")


def test_a_tensor_in_two_shards(tmp_path, tensors):
    shards = halves(tensors)
    shards["b.safetensors"][EMBED] = tensors[EMBED]
    shards["a.safetensors"][EMBED] = tensors[EMBED]
    path = write_shards(tmp_path / "a", shards)
    refused(path, rf"{EMBED} .* in both a\.safetensors and b\.safetensors")


def test_a_shard_that_is_missing(tmp_path, tensors):
    path = write_shards(tmp_path / "a", halves(tensors))
    (path / "b.safetensors").unlink()
    refused(path, r"names b\.safetensors, which is missing")


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth"],
)
def test_pickles_are_refused(tmp_path, name):
    path = write_folder(tmp_path / "a")
    (path / name).write_bytes(b"\x80\x02}q\x00.")
    refused(path, rf"pickled weights only \({name}\)")


def test_folders_without_weights_or_config(tmp_path):
    refused(tmp_path, r"config\.json is missing")
    path = write_folder(tmp_path / "a")
    refused(path, r"no model\.safetensors")
    for text, message in (("{", "not valid JSON"), ("3", "not hold a JSON object")):
        (path / "config.json").write_text(text)
        refused(path, message)


def test_a_model_of_the_hub_loads_from_its_cache(tmp_path, tensors, monkeypatch):
    """Without a network, a folder in huggingface_hub's cache is used."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "models--owner--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0123abcd")
    (home / "snapshots").mkdir()
    write_folder(home / "snapshots" / "0123abcd", tensors)
    model = weights.load("owner/tiny")
    assert model.spec.num_layers == 2
    with pytest.raises(UserError, match="cannot fetch owner/other from the Hugging"):
        weights.load("owner/other")


def test_what_is_fetched_of_a_hub_folder():
    """By huggingface_hub's own filter, of a listing as such folders have it."""
    from huggingface_hub.utils import filter_repo_objects

    listed = [
        *("config.json", "generation_config.json", "model.safetensors.index.json"),
        *("model-00001-of-00002.safetensors", "consolidated.safetensors"),
        *("original/params.json", "original/consolidated.00.pth", "pytorch_model.bin"),
        *("tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"),
        *("README.md", "model.gguf", "onnx/model.onnx", "onnx/config.json"),
    ]
    kept = filter_repo_objects(
        listed, allow_patterns=hub._INCLUDED, ignore_patterns=hub._EXCLUDED
    )
    assert list(kept) == [
        *("config.json", "generation_config.json", "model.safetensors.index.json"),
        "model-00001-of-00002.safetensors",
        *("tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"),
    ]
