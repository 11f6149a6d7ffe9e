"""What is done to arrays in host memory, against NumPy; by rows and as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.parallel import host

B, K, C, D = 3, 2, 5, 4


@pytest.fixture(params=[True, False], ids=["by rows", "whole"])
def away(request, monkeypatch):
    """What moves an array to the host; computed upon there, or on the device."""
    monkeypatch.setattr(host, "works_by_rows", lambda: request.param)
    return host.to_host


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run(work, *given):
    """Within a program, which has to leave the result where x was."""
    found = jax.jit(work)(*given)
    assert host.is_host(found)
    return np.asarray(found)


def test_where_arrays_lie():
    x = jnp.ones((2, 3))
    there = host.to_host({"x": x, "y": (x,)})
    assert all(map(host.is_host, jax.tree.leaves(there)))
    back = host.to_device({"away": there, "here": x})
    assert not any(map(host.is_host, jax.tree.leaves(back)))
    assert back["here"] is x


def test_take(away):
    x, slots = numbers(B, K, C, D), np.array([[[4, 4], [0, 1]]] * B, np.int32)
    wanted = np.take_along_axis(x, slots[..., None], axis=2)
    np.testing.assert_array_equal(run(host.take, away(x), slots), wanted)
    scales = numbers(B, K, C)
    wanted = np.take_along_axis(scales, slots, axis=2)
    np.testing.assert_array_equal(run(host.take, away(scales), slots), wanted)


def test_put(away):
    """A slot of C or more is nowhere."""
    x, new = numbers(B, K, C, D), numbers(B, K, 2, D, seed=1)
    slots = np.tile(np.arange(C + 2), (B, K, 1))
    slots = np.random.default_rng(2).permuted(slots, axis=-1)
    slots = slots[..., :2].astype(np.int32)
    wanted = x.copy()
    for b, k, t in np.ndindex(slots.shape):
        if slots[b, k, t] < C:
            wanted[b, k, slots[b, k, t]] = new[b, k, t]
    assert (slots >= C).any() and not np.array_equal(wanted, x)
    np.testing.assert_array_equal(run(host.put, away(x), slots, new), wanted)


def test_exchange(away):
    """What is read is as it is after the write, its own rows among it."""
    x, new = numbers(B, K, C, D), numbers(B, K, 1, D, seed=1)
    slots = np.array([[[0], [C]], [[4], [2]], [[1], [1]]], np.int32)
    wanted = np.array([[[0, 1], [3, 3]], [[4, 4], [0, 2]], [[2, 0], [1, 2]]], np.int32)
    there = x.copy()
    for b, k in np.ndindex(B, K):
        if slots[b, k, 0] < C:
            there[b, k, slots[b, k, 0]] = new[b, k, 0]
    kept, some = jax.jit(host.exchange)(away(x), slots, new, wanted)
    assert host.is_host(kept) and host.is_host(some)
    np.testing.assert_array_equal(kept, there)
    read = np.take_along_axis(there, wanted[..., None], axis=2)
    np.testing.assert_array_equal(some, read)


@pytest.mark.parametrize("there", [True, False], ids=["from host", "from device"])
@pytest.mark.parametrize("rows", [(0, 1), (2, 0), (B, 1)], ids=str)
def test_insert(away, there, rows):
    """Into any rows; one beyond the last is dropped."""
    x, part = numbers(B, K, C, D), numbers(2, K, C, D, seed=1)
    expected = x.copy()
    for row, new in zip(rows, part, strict=True):
        if row < B:
            expected[row] = new
    inserted = away(part) if there else part
    found = run(host.insert, away(x), inserted, np.array(rows, np.int32))
    np.testing.assert_array_equal(found, expected)


def test_insert_into_the_device(away):
    x, part = jnp.asarray(numbers(B, D)), numbers(1, D, seed=1)
    found = jax.jit(host.insert)(x, away(part), np.array([2], np.int32))
    assert not host.is_host(found)
    np.testing.assert_array_equal(found, np.concatenate([x[:2], part]))


def test_rows(away):
    x, chosen = numbers(B, K, C, D), np.array([2, 0, 2, 1], np.int32)
    np.testing.assert_array_equal(run(host.rows, away(x), chosen), x[chosen])


def test_shapes_know_where_they_lie():
    def make():
        x = jnp.zeros((6, 2), jnp.bfloat16)
        return {"here": x, "there": host.to_host(x)}

    found = host.like(make)
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == dict.fromkeys(
        ("here", "there"), ((6, 2), jnp.bfloat16)
    )
    assert host.nbytes(found) == host.nbytes(found["there"]) == 6 * 2 * 2
    assert host.nbytes(jax.jit(make)()) == 6 * 2 * 2
    over = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data"))
    assert host.beside(found["here"], over) == over
    there = host.beside(found["there"], over)
    assert there.memory_kind == host.KIND and there.spec == over.spec
    split = jax.device_put(np.zeros((6, 2), np.float32), there)
    assert host.nbytes(split) == 3 * 2 * 4  # of each device


@pytest.fixture
def untried():
    host._tried.cache_clear()
    yield
    host._tried.cache_clear()


def test_a_host_that_computes(untried):
    assert host.is_there() and host.works_by_rows()


def broken():
    raise RuntimeError("no scatter here\nand more")


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (lambda: "a row came back as another", "came back as another"),
        (broken, "RuntimeError: no scatter here"),
    ],
)
def test_a_host_that_does_not_is_told_once(untried, monkeypatch, case, told):
    monkeypatch.setattr(host, "_wrong", case)
    with pytest.warns(UserWarning, match=f"{told}.*whole layers"):
        assert not host.works_by_rows()
    assert not host.works_by_rows()  # a second warning would be an error
