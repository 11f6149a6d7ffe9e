"""Staggered prefill against the ordinary run, and its plan against the programs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from conftest import often, tiny_spec
from testing.engine import requests_for, run_batch

from kvjax import Schedule, UserError, cache, policies
from kvjax.cache.spec import make_spec
from kvjax.engine import compiled, planner, runner
from kvjax.engine.footprint import phase_bytes, state_bytes, weights_bytes
from kvjax.engine.jobs import Job, bucket
from kvjax.engine.planner import plan_job
from kvjax.engine.sampling import Sampling, SamplingSpec

AFTER = Schedule("after_prefill", prefill_chunk=8)
READING = Schedule("prefill_only", prefill_chunk=8)
ED = Schedule("decode_only", prefill_chunk=8, evict_size=1)
MEMORY = 8_000_000
SPEC = tiny_spec(num_layers=3, head_dim=16, context_length=4096)


def job(spec, policy, budget=24, schedule=AFTER, batch=5, longest=100, new=6, **more):
    config = make_spec(spec, policy, budget, schedule)
    return Job(spec, config, batch, bucket(spec, config, longest, new), new, **more)


def ragged(count, longest=100, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, count)
    return [rng.integers(0, 50, length).tolist() for length in lengths]


def pooled_run(params, job, group, *given, **how):
    """The same job, `group` prompts read at a time."""
    return run_batch(
        params, dataclasses.replace(job, prefill_batch=group), *given, **how
    )


JOBS = [
    (policies.snapkv(window=4), AFTER, 24),
    (policies.average_attention(), AFTER, 16),
    (policies.key_diff(), AFTER, (8, 40)),
    (policies.key_diff(), AFTER, ((8, 40), 16)),
    (policies.expected_attention(), AFTER, 24),
    (policies.fastgen(), AFTER, 24),
    (policies.h2o(), READING, 24),
    (policies.recency(), ED, 2),
]
QUICK = [JOBS[0], JOBS[3], JOBS[6], JOBS[7]]  # a kind of schedule or of sizes each


@pytest.mark.parametrize(
    ("policy", "schedule", "budget"),
    often(JOBS, QUICK, others="e2e", several=True),
    ids=lambda each: getattr(each, "name", None),
)
def test_tokens_and_state_are_those_of_a_fixed_batch(tiny, policy, schedule, budget):
    """Ragged prompts; a group of 2 does not divide the 5 rows, and one row is spare."""
    config = job(tiny.spec, policy, budget, schedule)
    prompts, indices = ragged(4), [7, 1, 4, 2]
    ordinary = run_batch(tiny.params, config, prompts, indices)
    pooled = pooled_run(tiny.params, config, 2, prompts, indices)
    assert pooled.tokens == ordinary.tokens
    assert all(len(tokens) == 6 for tokens in pooled.tokens)
    kept, expected = map(cache.kept_positions, (pooled.state, ordinary.state))
    jax.tree.map(np.testing.assert_array_equal, kept, expected)
    close = functools.partial(np.testing.assert_allclose, atol=1e-4)
    jax.tree.map(close, pooled.state.stats, ordinary.state.stats)


def test_sampled_tokens_are_those_of_a_fixed_batch(tiny):
    """The keys go with the prompts' numbers, whatever group reads them."""
    sampling = Sampling(temperature=1.0)
    config = job(tiny.spec, policies.key_norm(), sampling=SamplingSpec(samples=True))
    prompts, indices = ragged(5, seed=3), [3, 0, 9, 4, 1]
    how = {"seed": 5, "sampling": sampling}
    ordinary = run_batch(tiny.params, config, prompts, indices, **how)
    pooled = pooled_run(tiny.params, config, 3, prompts, indices, **how)
    assert pooled.tokens == ordinary.tokens
    assert len({token for tokens in pooled.tokens for token in tokens}) > 5


def test_an_error_of_one_group_is_raised_at_the_end(tiny):
    asked = dataclasses.replace(
        job(tiny.spec, policies.recency(), batch=2), prefill_batch=1
    )
    whole = runner.Whole(tiny.params, asked)
    prompts = ragged(1)
    read = whole.prefill(prompts)
    error = np.full_like(read.state.error, cache.OVERFLOW)
    read = read._replace(state=read.state.replace(error=error))
    rows = np.asarray([1], np.int32)
    pool, _ = whole.insert(None, read, requests_for(asked, prompts), rows)
    with pytest.raises(RuntimeError, match="no empty slot"):
        whole.finished(pool)


def test_one_prompt_may_be_inserted_into_several_rows(tiny):
    """Each continues as the prompt alone does; a row beyond the pool is dropped."""
    alone = job(tiny.spec, policies.recency(), batch=1)
    (prompt,) = ragged(1)
    expected = run_batch(tiny.params, alone, [prompt], [0]).tokens[0]
    whole = runner.Whole(
        tiny.params, dataclasses.replace(alone, batch=4, prefill_batch=1)
    )
    read, pool = whole.prefill([prompt]), None
    for row in (0, 2, 4):
        requests = requests_for(alone, [prompt])
        pool, _ = whole.insert(pool, read, requests, np.asarray([row], np.int32))
    assert pool.done.tolist() == [False, True, False, True]
    tokens = whole.decode(pool, 5)[1].token
    assert tokens[0].tolist() == tokens[2].tolist() == expected[1:]
    assert (tokens[[1, 3]] == -1).all()


def test_the_pool_is_not_copied(tiny):
    """Donated buffers: all of the pool is updated in place."""
    asked = dataclasses.replace(job(tiny.spec, policies.recency()), prefill_batch=2)
    analysis = compiled.programs(asked).insert.memory_analysis()
    pool = state_bytes(asked)["decode"]
    assert analysis.alias_size_in_bytes >= pool
    assert analysis.temp_size_in_bytes < pool / 10


@pytest.mark.e2e
def test_the_largest_pool_then_the_largest_group():
    """The compiler's own count fits, and neither much more pool nor group does."""
    asked = job(SPEC, policies.snapkv(window=4), 128, longest=1024, new=64)
    found = planner.plan_staggered(asked, MEMORY)
    assert found.limited_by in ("prefill", "compact", "decode")
    peaks = phase_bytes(found.job)
    assert max(peaks.values()) <= found.peak_bytes <= MEMORY
    more = found.batch + 2
    larger = dataclasses.replace(found.job, batch=more, prefill_batch=1)
    assert max(phase_bytes(larger).values()) > MEMORY
    assert found.batch > 2 * plan_job(asked, MEMORY).batch
    assert weights_bytes(asked) + found.batch * found.row_bytes <= MEMORY


@pytest.mark.e2e
def test_few_prompts_are_read_in_larger_groups():
    asked = job(SPEC, policies.recency(), 128, longest=1024, new=64)
    few = planner.plan_staggered(asked, MEMORY, max_batch=12)
    assert (few.batch, few.limited_by) == (12, "prompts")
    group, times = few.prefill_groups
    assert 1 < group < 12
    more = dataclasses.replace(few.job, prefill_batch=group + 2)
    assert max(phase_bytes(more).values()) > MEMORY
    starts = runner._starts(few.job)
    assert starts == sorted(set(starts)) and starts[0] == 0
    assert len(starts) == times
    read = {row + i for row in starts for i in range(group)}
    assert read == set(range(12))


def test_refused():
    with pytest.raises(UserError, match="schedule 'prefill_and_decode' has none"):
        batch_max = job(
            SPEC, policies.recency(), 64, Schedule(prefill_chunk=8, evict_size=8)
        )
        planner.plan_staggered(batch_max, MEMORY)
    asked = job(SPEC, policies.recency(), 128, longest=1024, new=64)
    with pytest.raises(UserError, match="too small for one row"):
        planner.plan_staggered(asked, 10_000)
    one = max(phase_bytes(dataclasses.replace(asked, batch=1)).values())
    with pytest.raises(UserError, match="too small for one row"):
        planner.plan_staggered(asked, int(one * 0.95))
