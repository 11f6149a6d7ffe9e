"""Staggered prefill against the ordinary run, and its plan against the programs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from conftest import tiny_spec

from kvjax import Schedule, UserError, cache, policies
from kvjax.cache.config import make_config
from kvjax.engine import api, staggered
from kvjax.engine.compiled import Job, bucket
from kvjax.engine.planner import plan_job, state_bytes, weights_bytes
from kvjax.engine.sampling import Sampling

AFTER = Schedule("after_prefill", prefill_chunk=8)
ED = Schedule("decode_only", prefill_chunk=8, evict_size=1)
MEMORY = 8_000_000
SPEC = tiny_spec(num_layers=3, head_dim=16, context_length=4096)


@pytest.fixture(scope="module", autouse=True)
def _programs_go_with_this_module():
    yield
    staggered.compile_programs.cache_clear()


def job(spec, policy, budget=24, schedule=AFTER, batch=5, longest=100, new=6, **more):
    config = make_config(spec, policy, budget, schedule)
    return Job(spec, config, batch, bucket(spec, config, longest, new), new, **more)


def ragged(count, longest=100, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, count)
    return [rng.integers(0, 50, length).tolist() for length in lengths]


def by_hand(config, group):
    """A plan of given sizes, for runs that are not about memory."""
    return staggered.StaggeredPlan(config, "prompts", 0, 0, 0, 0, group)


@pytest.mark.parametrize(
    ("policy", "schedule", "budget"),
    [
        (policies.snapkv(window=4), AFTER, 24),
        (policies.average_attention(), AFTER, 16),
        (policies.key_diff(), AFTER, (8, 40)),
        (policies.expected_attention(), AFTER, 24),
        (policies.fastgen(), AFTER, 24),
        (policies.recency(), ED, 2),
    ],
    ids=lambda each: getattr(each, "name", None),
)
def test_tokens_and_state_are_the_ordinary_run_s(tiny, policy, schedule, budget):
    """Ragged prompts; a group of 2 does not divide the 5 rows, and one row is spare."""
    config = job(tiny.spec, policy, budget, schedule)
    prompts, indices = ragged(4), [7, 1, 4, 2]
    ordinary = api.run_batch(tiny.params, config, prompts, indices)
    pooled = staggered.run_batch(tiny.params, by_hand(config, 2), prompts, indices)
    assert pooled.tokens == ordinary.tokens
    assert all(len(tokens) == 6 for tokens in pooled.tokens)
    kept, expected = map(cache.kept_positions, (pooled.state, ordinary.state))
    jax.tree.map(np.testing.assert_array_equal, kept, expected)
    close = functools.partial(np.testing.assert_allclose, atol=1e-4)
    jax.tree.map(close, pooled.state.stats, ordinary.state.stats)


def test_sampled_tokens_too(tiny):
    """The keys go with the prompts' numbers, whatever group reads them."""
    how = Sampling(temperature=1.0)
    config = job(tiny.spec, policies.key_norm(), how=how)
    prompts, indices = ragged(5, seed=3), [3, 0, 9, 4, 1]
    ordinary = api.run_batch(tiny.params, config, prompts, indices, seed=5)
    pooled = staggered.run_batch(tiny.params, by_hand(config, 3), prompts, indices, 5)
    assert pooled.tokens == ordinary.tokens
    assert len({token for tokens in pooled.tokens for token in tokens}) > 5


def test_an_error_of_one_group_stays(tiny):
    config = job(tiny.spec, policies.recency(), batch=2)
    compiled = staggered.compile_programs(config, 1)
    pool, logits = compiled.init_pool(), np.zeros((2, 50), np.float32)
    group = api.run_batch(
        tiny.params, dataclasses.replace(config, batch=1), ragged(1), [0]
    ).state
    group = group.replace(error=np.full_like(group.error, cache.OVERFLOW))
    pool, _ = compiled.insert(pool, logits, group, logits[:1], np.int32(1))
    with pytest.raises(RuntimeError, match="no empty slot"):
        cache.raise_errors(pool)


def test_the_pool_is_not_copied(tiny):
    """Donated buffers: all of the pool is updated in place."""
    config = job(tiny.spec, policies.recency())
    analysis = staggered.compile_programs(config, 2).insert.memory_analysis()
    pool = state_bytes(config)["decode"]
    assert analysis.alias_size_in_bytes >= pool
    assert analysis.temp_size_in_bytes < pool / 10


def test_the_largest_pool_then_the_largest_group():
    """The compiler's own count fits, and neither much more pool nor group does."""
    asked = job(SPEC, policies.snapkv(window=4), 128, longest=1024, new=64)
    found = staggered.plan_job(asked, MEMORY)
    assert found.limit in ("prefill", "compact", "decode")
    peaks = staggered.phase_bytes(found.job, found.group)
    assert max(peaks.values()) <= found.peak_bytes <= MEMORY
    larger = dataclasses.replace(found.job, batch=found.batch + 2)
    assert max(staggered.phase_bytes(larger, 1).values()) > MEMORY
    assert found.batch > 2 * plan_job(asked, MEMORY).batch
    assert weights_bytes(asked) + found.batch * found.row_bytes <= MEMORY


def test_few_prompts_leave_room_for_larger_groups():
    asked = job(SPEC, policies.recency(), 128, longest=1024, new=64)
    few = staggered.plan_job(asked, MEMORY, max_batch=12)
    assert (few.batch, few.limited_by) == (12, "prompts")
    assert 1 < few.group < 12
    more = staggered.phase_bytes(few.job, few.group + 2)
    assert max(more.values()) > MEMORY
    assert few.starts == sorted(set(few.starts)) and few.starts[0] == 0
    assert len(few.starts) == few.groups
    read = {row + i for row in few.starts for i in range(few.group)}
    assert read == set(range(12))


def test_refused():
    with pytest.raises(UserError, match="schedule 'prefill\\+decode' has none"):
        batch_max = job(
            SPEC, policies.recency(), 64, Schedule(prefill_chunk=8, evict_size=8)
        )
        staggered.plan_job(batch_max, MEMORY)
    asked = job(SPEC, policies.recency(), 128, longest=1024, new=64)
    with pytest.raises(UserError, match="too small for one row"):
        staggered.plan_job(asked, 10_000)
    one = max(
        staggered.phase_bytes(dataclasses.replace(asked, batch=1), group=1).values()
    )
    with pytest.raises(UserError, match="too small for one row"):
        staggered.plan_job(asked, int(one * 0.95))
