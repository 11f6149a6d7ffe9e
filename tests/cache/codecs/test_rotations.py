"""Rotations: orthonormal, undone, and worth something where channels are large."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often

from kvjax import UserError
from kvjax.cache import codecs
from kvjax.cache.codecs import rotation

DEPTHS = (1, 2, 8, 12, 20, 24, 40, 64, 80, 96, 128, 160, 192, 256)


@pytest.mark.parametrize("depth", DEPTHS)
def test_orthonormal(depth):
    matrix = rotation.hadamard(depth)
    assert matrix.shape == (depth, depth) and matrix.dtype == np.float32
    np.testing.assert_allclose(np.abs(matrix), 1 / np.sqrt(depth), rtol=1e-6)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(depth), atol=2e-6)


@pytest.mark.parametrize("depth", [6, 36, 72, 100, 112, 240])
def test_no_such_order(depth):
    with pytest.raises(UserError, match=f"head_dim of {depth}: "):
        rotation.hadamard(depth)


@pytest.mark.parametrize("depth", often([64, 80, 96, 128, 256], [80], "e2e"))
def test_undone(depth):
    """Around a codec that loses nothing; what is stored is turned."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5, depth)), jnp.float32)
    tensor = codecs.rotated("identity").key
    stored = tensor.encode(x)
    np.testing.assert_allclose(tensor.decode(stored, x.dtype), x, atol=1e-5)
    norm = lambda x: np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(norm(stored), norm(x), rtol=1e-5)
    assert not np.allclose(stored, x, atol=0.1)
    turned = stored @ np.swapaxes(np.asarray(stored), -1, -2)  # as q (k)^T would
    np.testing.assert_allclose(turned, x @ np.swapaxes(x, -1, -2), atol=1e-3)


@pytest.mark.parametrize("bits", ["int4", "int2"])
def test_a_large_channel_no_longer_takes_all_steps(bits):
    x = np.random.default_rng(1).normal(size=(1, 2, 200, 64)).astype(np.float32)
    x[..., [7, 50]] *= 30
    errors = []
    for name in (bits, f"{bits}_rotated"):
        tensor = codecs.make(name).key
        both_ways = lambda x, t=tensor: t.decode(t.encode(x), jnp.dtype("float32"))
        errors.append(np.mean((np.asarray(jax.jit(both_ways)(x)) - x) ** 2))
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("depth", [64, 80, 96, 128, 256])
def test_no_column_adds_up_all_channels(depth):
    """Else an offset that channels share would be sqrt(depth) times as large there."""
    sums = np.ones(depth) @ rotation.hadamard(depth)
    assert np.abs(sums).max() < 2.5
    assert np.sum(sums**2) == pytest.approx(depth, rel=1e-5)


@pytest.mark.parametrize("bits", ["int4", "int2"])
def test_an_offset_loses_no_more_than_gaussian_values(bits):
    """Its channels are turned into values of many sizes, as Gaussian ones are."""
    noise = np.random.default_rng(2).normal(size=(1, 2, 200, 64)).astype(np.float32)
    tensor = codecs.make(f"{bits}_rotated").key
    both_ways = jax.jit(lambda x: tensor.decode(tensor.encode(x), jnp.dtype("float32")))

    def lost(x):
        return np.mean((np.asarray(both_ways(x)) - x) ** 2) / np.mean(x**2)

    for offset in (1, 3, 10):
        assert lost(noise + offset) < 1.05 * lost(noise)


def test_signs_are_the_same_in_every_run():
    signs = rotation.hadamard(64)[:8, 0] > 0
    assert signs.tolist() == [False, True, True, True, False, True, True, False]


def test_names_agree():
    assert codecs.rotated("int4") == codecs.int4_rotated()
    assert codecs.rotated(codecs.int4(16, False)) == codecs.int4_rotated(16, False)
    newest = codecs.pair("int8", "int4", residual_length=4)
    assert codecs.rotated(newest).residual_length == 4
