"""Compiled programs: kept up to a limit, so that memory does not grow with policies."""

import dataclasses
import itertools
import operator
import pathlib
import weakref

import jax
import pytest
from conftest import tiny_model, tiny_spec
from testing.engine import compilations

import kvjax
from kvjax import Schedule, UserError, cache, policies
from kvjax.engine import compiled, memory, runner
from kvjax.engine.jobs import Job
from kvjax.engine.planner import plan_job
from kvjax.models import decoder
from kvjax.parallel import meshes

SCHEDULE = Schedule(prefill_chunk=8, evict_size=8)


def job(spec, budget, policy=None):
    policy = policy or policies.recency()
    config = cache.make_spec(spec, policy, budget, SCHEDULE)
    return Job(spec, config, 2, 64, 4)


@pytest.fixture
def sized(monkeypatch):
    """Every job's programs take 100 MB, as the process's memory has it."""
    kvjax.clear_programs()
    resident = itertools.count(step=10**8)
    monkeypatch.setattr(memory, "resident", lambda: next(resident))


@pytest.mark.parametrize(("gigabytes", "kept"), [("0.35", 3), ("0.15", 1), ("0", 1)])
def test_programs_are_kept_up_to_a_limit(sized, monkeypatch, gigabytes, kept):
    """The least recently used ones are dropped, and their memory is free."""
    monkeypatch.setenv("KVJAX_PROGRAMS_GB", gigabytes)
    spec = tiny_spec(num_layers=1)
    jobs = [job(spec, 16 + i) for i in range(4)]
    dropped = weakref.ref(compiled.programs(jobs[0]).prefill)
    for each in jobs:
        compiled.programs(each)
    assert list(compiled._kept) == jobs[-kept:]
    assert dropped() is None
    kvjax.clear_programs()
    assert not compiled._kept


def test_two_policies_in_turn_compile_once_each(sized):
    spec = tiny_spec(num_layers=1)
    two = [job(spec, 16), job(spec, 16, policies.key_diff())]
    first = [compiled.programs(each) for each in two]
    again = [compiled.programs(each) for each in two]
    assert all(map(operator.is_, first, again))


def test_a_limit_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("KVJAX_PROGRAMS_GB", "much")
    with pytest.raises(UserError, match="KVJAX_PROGRAMS_GB is 'much': give gigabytes"):
        compiled.kept_limit()


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
    """One after another, as in a notebook; needs a process of its own (-n 0)."""
    text = "The quick brown fox jumps over the lazy dog. " * 12
    asked = [(name, 100) for name in policies.names()]
    asked += [("key_diff", 64 + 8 * i) for i in range(10)]
    for name, budget in asked:
        how = {"policy": name, "budget": budget, "memory_gb": 2}
        kvjax.generate(smollm2, [text], max_new_tokens=4, **how)
        print(f"{name}, {budget}: at most {resident_peak() / 1e9:.2f} GB", flush=True)
    assert resident_peak() < 2e9
