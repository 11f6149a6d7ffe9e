"""Compiled programs: a few jobs' are kept, and memory does not grow with policies."""

import dataclasses
import pathlib
import weakref

import jax
import pytest
from conftest import tiny_model, tiny_spec
from testing.engine import compilations

import kvjax
from kvjax import Schedule, cache, policies
from kvjax.engine import compiled, runner
from kvjax.engine.compiled import Job
from kvjax.engine.planner import plan_job
from kvjax.models import decoder
from kvjax.parallel import meshes

SCHEDULE = Schedule(prefill_chunk=8, evict_size=8)


def job(spec, budget, policy=None):
    policy = policy or policies.recency()
    config = cache.make_spec(spec, policy, budget, SCHEDULE)
    return Job(spec, config, 2, 64, 4)


def test_a_few_jobs_are_kept():
    spec = tiny_spec(num_layers=1)
    jobs = [job(spec, 16 + i) for i in range(compiled._KEPT + 2)]
    first = compiled.programs(jobs[0])
    assert compiled.programs(jobs[0]) is first
    for each in jobs:
        compiled.programs(each)
    assert len(compiled._known) == compiled._KEPT
    assert jobs[-1] in compiled._known and jobs[0] not in compiled._known
    kvjax.clear_programs()
    assert not compiled._known


def test_a_compiler_gets_the_room_of_another_policys_programs():
    spec = tiny_spec(num_layers=1)
    first, second = job(spec, 16), job(spec, 16, policies.key_diff())
    gone = weakref.ref(compiled.programs(first).prefill)
    compiled.programs(second)
    assert list(compiled._known) == [second]
    assert gone() is None


def test_a_plan_carries_the_programs_that_it_measured(tiny):
    plan = plan_job(job(tiny.spec, 24), 10**9, 3)
    assert plan.programs is compiled.programs(plan.job)
    kvjax.clear_programs()
    state = plan.programs.init()  # what somebody holds goes on working
    assert cache.capacities(state) == (24, 24)


@pytest.mark.parametrize("over", [None, "data:2,model:4"])
def test_a_first_batch_compiles_nothing_more(over):
    """Its seconds are those of the device: all programs are there by then."""
    model = tiny_model(num_layers=1)
    given, mesh = job(model.spec, 24), over and meshes.mesh(over, 2)
    given, params = dataclasses.replace(given, mesh=mesh), model.params
    if mesh:
        params = jax.device_put(params, decoder.param_partitions(given.spec, mesh))
    whole = runner.Whole(params, given)
    runner.prefill_batch(whole, [[1, 2], [3]], range(2))  # for JAX's own first steps
    jax.clear_caches()
    with compilations() as made:
        runner.prefill_batch(whole, [[1, 2], [3]], range(2))
    assert made == []


def resident_peak():
    """The largest resident set that this process has had, in bytes."""
    status = pathlib.Path("/proc/self/status").read_text()
    line = next(each for each in status.splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.model
def test_every_policy_and_ten_budgets_in_one_process_stay_below_2_gb(smollm2):
    """One after another, as in a notebook; for a process of its own (-n 0)."""
    text = "The quick brown fox jumps over the lazy dog. " * 12
    asked = [(name, 100) for name in policies.names()]
    asked += [("key_diff", 64 + 8 * i) for i in range(10)]
    for name, budget in asked:
        how = {"policy": name, "budget": budget, "memory_gb": 2}
        kvjax.generate(smollm2, [text], max_new_tokens=4, **how)
        print(f"{name}, {budget}: at most {resident_peak() / 1e9:.2f} GB", flush=True)
    assert resident_peak() < 2e9
