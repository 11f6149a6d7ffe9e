"""Tiny checkpoints of the llama architecture, for the tests of loading."""

import json

import jax
import numpy as np
import safetensors.numpy

from kvjax.models.families import llama
from kvjax.models.families.hf_config import Config
from kvjax.models.weights import pack

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 270,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
}


def tensors(**changes):
    """A checkpoint by Hugging Face name, float32."""
    spec = llama.spec_from_hf(Config({**CONFIG, **changes}, "CONFIG"), "tiny")
    rng = np.random.default_rng(0)
    shapes = pack.tensor_shapes(spec, llama.tensor_names(spec))
    return {n: rng.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}


def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVJAX_CACHE", str(folder))
    return folder


def write_folder(path, tensors=None, **changes):
    path.mkdir(exist_ok=True)
    config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not ...}
    (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return path


def write_shards(path, shards, index=None, **changes):
    """A folder of several files: `{file: {name: tensor}}`, and their index."""
    write_folder(path, **changes)
    for file, own in shards.items():
        safetensors.numpy.save_file(own, path / file)
    home = {name: file for file, own in shards.items() for name in own}
    index = {"weight_map": home} if index is None else index
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def halves(tensors):
    """The tensors in two shards, names in turn."""
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    return {f: {n: tensors[n] for n in own} for f, own in shards.items()}


def assert_same_params(left, right, **tolerance):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), **tolerance
        )


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 600
    return text
