"""Tests of params and their copies in the cache folder split over eight devices."""

import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from testing import checkpoints
from testing.checkpoints import assert_same_params, halves, write_shards

from kvjax.models import decoder, weights
from kvjax.models.weights import pack
from kvjax.models.weights import tensors as files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    return checkpoints.cache(tmp_path, monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return write_shards(tmp_path / "model", halves(checkpoints.tensors()))


@pytest.fixture
def made(monkeypatch):
    """The list of loads from the checkpoint itself since the start of the test."""
    calls, packed = [], pack.pack

    def counted(*args, **kwargs):
        calls.append(args)
        return packed(*args, **kwargs)

    monkeypatch.setattr(pack, "pack", counted)
    return calls


def spread(count=8, order=""):
    """Last axes over `count` devices where they divide; `order` turns gate_up round."""
    mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])

    def sharding(shape):
        axes = [None] * len(shape)
        if shape[-1] % count == 0:
            axes[-1] = "x"
        return NamedSharding(mesh, PartitionSpec(*axes))

    def place(spec, path, array):
        assert isinstance(array, np.ndarray)
        assert path in {keys(p) for p, _ in leaves(decoder.param_shapes(spec))}
        if order and path[-1] == "gate_up":
            array = array[::-1]
        return jax.device_put(array, sharding(array.shape))

    def shardings(spec):
        shapes = decoder.param_shapes(spec)
        return jax.tree.map(lambda leaf: sharding(leaf.shape), shapes)

    return pack.Placement(place, shardings, order)


def leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def keys(path):
    """("layers", 0, "qkv")"""
    return tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path)


def test_params_go_where_they_are_put(folder, made, cache):
    plain = weights.load(folder)
    assert not cache.exists()  # folders leave no copy unasked
    placement = spread()
    for _ in range(2):
        model = weights.load_placed(
            str(folder), jnp.dtype("float32"), placement=placement, cache_converted=True
        )
        assert_same_params(model.params, plain.params, rtol=0)
        wanted = placement.shardings(model.spec)
        assert jax.tree.map(lambda leaf: leaf.sharding, model.params) == wanted
        qkv = model.params["layers"][0]["qkv"]
        assert {shard.data.shape for shard in qkv.addressable_shards} == {(64, 4)}
    assert len(made) == 2
    # The copy lies on other devices if it is asked to.
    fewer = weights.load_placed(
        str(folder), jnp.dtype("float32"), placement=spread(2), cache_converted=True
    )
    assert len(fewer.params["embed"].sharding.device_set) == 2
    assert_same_params(
        weights.load(folder, cache_converted=True).params, plain.params, rtol=0
    )
    assert len(made) == 2


def test_orders_have_copies_of_their_own(folder, made):
    plain = weights.load(folder, cache_converted=True).params["layers"][0]["gate_up"]
    for _ in range(2):
        turned = weights.load_placed(
            str(folder),
            jnp.dtype("float32"),
            placement=spread(order="turned"),
            cache_converted=True,
        )
        found = turned.params["layers"][0]["gate_up"]
        np.testing.assert_array_equal(found, np.asarray(plain)[::-1])
    assert len(made) == 2


def test_gguf_params_go_where_they_are_put(tmp_path):
    from testing.gguf_files import write_gguf

    path = write_gguf(tmp_path / "m.gguf", checkpoints.tensors())
    plain, placement = weights.load(path, cache_converted=False), spread()
    for _ in range(2):
        model = weights.load_placed(
            str(path), jnp.dtype("float32"), placement=placement
        )
        assert_same_params(model.params, plain.params, rtol=0)
        wanted = placement.shardings(model.spec)
        assert jax.tree.map(lambda leaf: leaf.sharding, model.params) == wanted


def test_a_copy_is_of_files_as_they_are(folder, made):
    first = weights.load(folder, cache_converted=True)
    tensors = checkpoints.tensors()
    write_shards(folder, halves({name: 2 * a for name, a in tensors.items()}))
    second = weights.load(folder, cache_converted=True)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, first.params)
    assert_same_params(second.params, doubled, rtol=0)
    weights.load(folder, "bfloat16", cache_converted=True)
    assert len(made) == 3


def test_a_folder_whose_files_are_damaged_has_no_copy(folder):
    weights.load(folder, cache_converted=True)
    file = folder / "b.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(weights.UserError, match="truncated"):
        weights.load(folder, cache_converted=True)


def test_the_spec_is_the_folders_and_the_context_the_callers(folder, made):
    """A folder's copy holds only weights; the rest is read from the folder."""
    weights.load(folder, cache_converted=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    model = weights.load(folder, context=20, cache_converted=True)
    assert (model.spec.context_length, model.end_tokens) == (20, (5,))
    assert len(made) == 1


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_a_damaged_copy_of_a_folder_is_made_again(folder, made, cache, capsys, how):
    first = weights.load(folder, cache_converted=True)
    (copy,) = (cache / "copies").iterdir()
    files = [path for path in copy.rglob("*") if path.is_file()]
    file = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if how == "flip" else content[:-10])
    again = weights.load(folder, cache_converted=True)
    assert "cannot be used" in capsys.readouterr().err
    assert_same_params(again.params, first.params, rtol=0)
    weights.load(folder, cache_converted=True)
    assert len(made) == 2


def test_the_host_holds_one_tensor_at_a_time(folder, monkeypatch):
    """When an array is read, the host holds none of those before."""
    before, read = [], files.Tensor.read

    def watched(self, dtype):
        assert all(reference() is None for reference in before)
        found = read(self, dtype)
        before.append(weakref.ref(found))
        return found

    monkeypatch.setattr(files.Tensor, "read", watched)
    # On the CPU, params may be views of what was read: not so these.
    copied = spread()._replace(place=lambda _, path, array: jnp.asarray(array.copy()))
    weights.load_placed(str(folder), jnp.dtype("float32"), placement=copied)
    assert len(before) == len(checkpoints.tensors())
