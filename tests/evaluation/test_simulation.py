"""Steps' costs against the roofline of whole batches; loads whose answer is known."""

import dataclasses

import numpy as np
import pytest
from conftest import tiny_spec

from kvjax.cache.spec import make_spec
from kvjax.engine.jobs import Job
from kvjax.engine.planner import as_plan
from kvjax.engine.simulated import Decoding, Reading, SimulatedExecutor, constant_costs
from kvjax.evaluation import roofline, simulation, step_costs
from kvjax.evaluation.roofline import Device, Rates
from kvjax.evaluation.simulation import Load
from kvjax.types import UserError

SPEC = tiny_spec(num_layers=3, head_dim=16, context_length=4096)
RATES = Rates(1e9, 2e10, 1e8)
CONFIGS = {
    "full": make_spec(SPEC),
    "evicts while reading": make_spec(SPEC, "key_diff", 64),
    "compacts": make_spec(SPEC, "snapkv", 64, "after_prefill"),
    "decodes in a budget": make_spec(SPEC, "key_diff", 64, "decode_only", codec="int8"),
}


def job_of(config, rows=3, group=1, prompt=320, new=8):
    return Job(SPEC, config, rows, prompt, new, prefill_batch=group)


def each(steps, rates):
    """Seconds of each step."""
    return [roofline.seconds([work], rates) for work in steps]


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        *((name, RATES) for name in CONFIGS),
        ("full", Rates(1e9, 1e30)),
        ("full", Rates(1e30, 1e9)),
    ],
)
def test_equal_rows_take_what_a_fixed_batch_takes(name, rates):
    """Where the rooflines are one: the whole of a batch's decode, of its prefill."""
    job = job_of(CONFIGS[name])
    costs = step_costs.roofline_costs(job, rates)
    plan = as_plan(dataclasses.replace(job, prefill_batch=None), "prompts", 0, 0)
    for length in (1, 320):
        rows = Decoding(*np.array([[length] * 3, [1] * 3, [7] * 3]))
        expected = [
            roofline.seconds([work], rates) for work in roofline.decode(plan, length)
        ]
        np.testing.assert_allclose(costs.decode(rows, 7), expected)
    first, chunk = job.config.first_chunk, job.config.schedule.prefill_chunk
    whole = first + 3 * chunk
    costs = step_costs.roofline_costs(dataclasses.replace(job, prefill_batch=3), rates)
    reading = Reading(np.array([whole] * 3), np.arange(4))
    expected = [
        roofline.seconds([work], rates) for work in roofline.prefill(plan, whole)
    ]
    np.testing.assert_allclose(costs.chunk(reading), expected[:4])


def test_lengths_in_between_are_interpolated():
    """The full cache's work grows with every token by as much."""
    job = job_of(CONFIGS["full"], rows=1)
    plan = as_plan(dataclasses.replace(job, prefill_batch=None), "prompts", 0, 0)
    costs = step_costs.roofline_costs(job, RATES)
    for length in (2, 17, 133, 319):
        rows = Decoding(*np.array([[length], [6], [1]]))
        expected = roofline.seconds(roofline.decode(plan, length)[5:6], RATES)
        np.testing.assert_allclose(costs.decode(rows, 1), [expected])


def test_rows_that_end_cost_no_more():
    costs = step_costs.roofline_costs(job_of(CONFIGS["full"]), RATES)
    rows = lambda *left: Decoding(*np.array([[99, 5, 320], [1, 8, 2], left]))
    all_three = costs.decode(rows(9, 9, 9), 6)
    ended = costs.decode(rows(9, 2, 4), 6)
    np.testing.assert_allclose(ended[:2], all_three[:2])
    assert (ended[2:] < all_three[2:]).all()
    two = costs.decode(Decoding(*np.array([[99, 320], [1, 2], [9, 9]])), 6)
    np.testing.assert_allclose(ended[2:4], two[2:4])


def test_a_mixed_step_reads_the_weights_once():
    """Of bytes alone, both parts together save the layers' weights."""
    rates = Rates(1e9, 1e30)
    job = job_of(CONFIGS["full"])
    costs = step_costs.roofline_costs(job, rates)
    rows = Decoding(*np.array([[99, 5], [1, 8], [9, 9]]))
    reading = Reading(np.array([320]), np.arange(2))
    apart = costs.decode(rows, 2) + costs.chunk(reading)
    weights = 4 * roofline.layer_weights(SPEC, 1) / rates.bytes_per_s
    np.testing.assert_allclose(costs.mixed(rows, reading), apart - weights)


def test_short_prompts_of_a_group_stop_reading():
    """Their pairs are no work in later chunks; the weights' work stays."""
    costs = step_costs.roofline_costs(
        job_of(CONFIGS["full"], group=2), Rates(1e9, 1e30)
    )
    read = lambda *prompts: costs.chunk(Reading(np.array(prompts), np.arange(3)))
    both, one = read(192, 192), read(192, 64)
    assert both[0] == one[0] and (both[1:] > one[1:]).all()


def test_an_insertion_moves_a_row_s_pairs():
    """Read and written, beside the logits' weights."""
    rates = Rates(1e9, 1e30)
    costs = step_costs.roofline_costs(job_of(CONFIGS["full"]), rates)
    pairs = lambda n: 2 * SPEC.num_layers * SPEC.num_kv_heads * SPEC.head_dim * n * 4
    grown = costs.insert(np.array([300])) - costs.insert(np.array([100]))
    np.testing.assert_allclose(grown, 2 * pairs(200) / rates.bytes_per_s)
    costs = step_costs.roofline_costs(job_of(CONFIGS["full"]), Rates(1e30, 1e9))
    flops = 2 * 2 * SPEC.vocab_size * SPEC.model_dim
    np.testing.assert_allclose(costs.insert(np.array([9, 9])), flops / 1e9)


# --- loads ----------------------------------------------------------------------------


def load_of(arrivals, prompts, outputs):
    return Load(np.array(arrivals, float), np.array(prompts), np.array(outputs))


def clocked(load, rows=2, **costs):
    executor = SimulatedExecutor(
        rows, 1, lambda each: int(load.outputs[each.number]), constant_costs(**costs)
    )
    return simulation.simulate(load, executor, limit=4)


def test_latencies_by_hand():
    """Two at once, one after a pause, one that comes in the middle of a call."""
    load = load_of([0, 0, 100, 103], [5, 5, 5, 5], [6, 3, 9, 2])
    found = clocked(load, chunk=1, mixed=10, decode=1, insert=0.5)
    # 0: inserted at 1.5; mixed until 11.5, the other inserted at 12; 4 steps until 16
    # 100: inserted at 101.5; 4 steps until 105.5; mixed until 115.5, inserted at 116
    assert found.first.tolist() == [1.5, 12, 1.5, 13]
    assert found.latency.tolist() == [16, 16, 19, 16]
    assert found.seconds == 119
    assert found.tokens_per_s == 20 / 119


def test_quantiles_are_of_tokens():
    """A row's tokens are 1 apart, but for the one beside another's chunk."""
    load = load_of([0, 0], [5, 5], [21, 1])
    found = clocked(load, chunk=1, mixed=7, decode=1, insert=0.25)
    assert found.between_tokens(0.5) == [1]
    assert found.between_tokens(1.0) == [7.25]  # the row's insertion came before


def test_rows_by_time():
    load = load_of([0, 0], [5, 5], [11, 6])
    found = clocked(load, chunk=0, mixed=0, decode=1)
    assert found.rows_by_time(2) == pytest.approx([2, 1], abs=0.5)
    assert np.mean(found.rows_by_time(2)) * found.seconds == pytest.approx(14)


def test_drawn_loads():
    load = simulation.draw_load(2000, prompt=512, new=64, requests_per_s=5)
    assert (np.diff(load.arrivals) >= 0).all()
    assert load.arrivals[-1] / 2000 == pytest.approx(1 / 5, rel=0.1)
    assert load.prompts.max() <= 512 and load.outputs.max() <= 64
    assert not simulation.draw_load(3, prompt=9, new=9).arrivals.any()
    with pytest.raises(UserError, match="requests_per_s 0"):
        simulation.draw_load(3, prompt=9, new=9, requests_per_s=0)


def test_a_device_serves_a_load():
    load = simulation.draw_load(60, prompt=64, new=60)
    config, device = CONFIGS["evicts while reading"], Device(RATES, 3e6)
    few = simulation.serve(SPEC, config, device, load, rows=1)
    many = simulation.serve(SPEC, config, device, load, rows=4)
    assert simulation.serve(SPEC, config, device, load).rows > 4
    assert sum(call.tokens for call in many.calls) == load.outputs.sum()
    assert many.end_to_end(0.5)[0] < few.end_to_end(0.5)[0]
    assert many.tokens_per_s > few.tokens_per_s
    said = str(many)
    assert "60 requests in" in said and "to the first token" in said
    with pytest.raises(UserError, match="tiny with prompts of"):
        simulation.serve(SPEC, config, Device(RATES, 1e5), load)
