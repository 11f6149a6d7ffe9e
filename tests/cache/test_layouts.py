"""Layouts that do not lead with rows, and the operations on rows of all layouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often
from testing import layer, toys
from testing.pooled import POOLED
from testing.rules import POLICIES

from kvjax import Schedule, cache
from kvjax.cache import layouts
from kvjax.cache.spec import make_spec

BUDGET, BLOCK, PROMPT, NEW, MOST = 56, 8, 72, 18, 33
SPEC = layer.spec_of(heads=2, group=3, depth=8)
DATA = layer.random_data(SPEC, MOST, PROMPT + NEW, seed=2)
LENGTHS = np.random.default_rng(2).integers(30, PROMPT + 1, MOST)
LAYOUTS = {"dense": layouts.DEFAULT, "halves": toys.HALVES, "pooled": POOLED}


def first_rows(batch):
    return DATA._replace(
        q=DATA.q[:batch],
        k=DATA.k[:batch],
        v=DATA.v[:batch],
        tokens=DATA.tokens[:batch],
    )


@functools.cache
def run(name, layout, batch):
    schedule = Schedule(prefill_chunk=BLOCK, evict_size=BLOCK)
    config = make_spec(SPEC, POLICIES[name], BUDGET, schedule, layout=LAYOUTS[layout])
    return layer.run(SPEC, config, first_rows(batch), LENGTHS[:batch], PROMPT)


@pytest.mark.parametrize("batch", [1, 9, MOST])
@pytest.mark.parametrize(
    "name", often(list(POLICIES), ["key_diff", "average_attention"], "e2e")
)
def test_a_pool_keeps_the_pairs_of_a_dense_cache(name, batch):
    """At batches within and beyond the rows that one eviction looks at together.

    Every row keeps the same pairs in the same slots, with the same keys and values.
    """
    pooled, dense = run(name, "pooled", batch), run(name, "dense", MOST)
    for here, there in zip(pooled.kept, dense.kept, strict=True):
        jax.tree.map(np.testing.assert_array_equal, here, there[:batch])
    held = [_pairs(each.end, batch) for each in (pooled, dense)]
    for here, there in zip(*held, strict=True):
        np.testing.assert_allclose(here, there, atol=1e-5)


def _pairs(state, batch):
    """Positions, keys and values of live slots, 0 elsewhere."""
    layout, (held,) = state.layout, state.layers
    live = np.asarray(layout.positions(held)[:batch] >= 0)
    shown = layout.positions(held), layout.keys(held), layout.values(held)
    mask = lambda x: live.reshape(live.shape + (1,) * (x.ndim - 3))
    return [np.where(mask(x), np.asarray(x)[:batch], 0) for x in shown]


@pytest.fixture(scope="module", params=LAYOUTS)
def filled(request):
    """Nine rows of a layout after decoding, and the statistics of a policy."""
    return run("average_attention", request.param, 9).end


def assert_same_rows(state, rows, other, others):
    """Checks that rows of one state hold what rows of another one hold."""
    for here, there in zip(_pairs(state, None), _pairs(other, None), strict=True):
        np.testing.assert_array_equal(here[rows], there[others])
    rest = [jax.device_get((x.stats, x.next_pos)) for x in (state, other)]
    for here, there in zip(*map(jax.tree.leaves, rest), strict=True):
        np.testing.assert_array_equal(here[rows], there[others])


def test_rows_are_inserted_anywhere_and_again(filled):
    """Scattered rows, one beyond the batch; two copies of the same part."""
    part = run("average_attention", filled.layout.name, 3).end
    assert cache.capacities(part) == cache.capacities(filled)
    insert = jax.jit(cache.insert)
    once = insert(filled, part, jnp.array([7, 9, 0]))
    assert_same_rows(once, [7, 0], part, [0, 2])
    assert_same_rows(once, [1, 2, 3, 4, 5, 6, 8], filled, [1, 2, 3, 4, 5, 6, 8])
    twice = insert(once, part, jnp.array([2, 4, 8]))
    assert_same_rows(twice, [7, 0, 2, 4, 8], part, [0, 2, 0, 1, 2])
    neighbours = cache.insert(filled, part, 5)
    assert_same_rows(neighbours, [5, 6, 7], part, [0, 1, 2])


def test_released_rows_are_empty(filled):
    live, allocated = cache.stored_bytes(filled)
    freed = jax.jit(cache.release)(filled, jnp.array([8, 30, 1]))
    kept = cache.kept_positions(freed)
    assert not any(len(head) for row in (1, 8) for head in kept[row][0])
    others = [0, 2, 3, 4, 5, 6, 7]
    assert_same_rows(freed, others, filled, others)
    assert freed.next_pos[jnp.array([1, 8])].tolist() == [0, 0]
    assert 0 < cache.stored_bytes(freed)[0] < live
    assert cache.stored_bytes(freed)[1] == allocated


def test_a_view_of_rows_shows_those_rows(filled):
    layout, (held,) = filled.layout, filled.layers
    chosen = jnp.array([6, 2, 2])
    view = jax.jit(layout.rows)(held, chosen)
    for shown in (layout.positions, layout.keys, layout.values):
        np.testing.assert_array_equal(shown(view), shown(held)[chosen])
