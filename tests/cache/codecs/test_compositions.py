"""Stored bits with all the rest: plans, sizes by head, pools, layer by layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_spec
from testing import toys
from testing.engine import run_batch

import kvjax
from kvjax import Schedule, cache, policies
from kvjax.cache import codecs
from kvjax.engine import layerwise, runner
from kvjax.engine.footprint import state_bytes
from kvjax.engine.jobs import Job, bucket

AFTER = Schedule("after_prefill", prefill_chunk=8)
WHILE = Schedule("prefill_and_decode", prefill_chunk=8, evict_size=8)
ONLY = Schedule("prefill_only", prefill_chunk=8, evict_size=8)
FULL = Schedule("none", prefill_chunk=8)
BUDGET = ((16, 40), (32, 24))
PACKED = {name: toys.OF_8_CHANNELS[name] for name in ("int4_outliers", "int2_rotated")}
PROMPTS = [
    np.random.default_rng(i).integers(0, 50, n).tolist()
    for i, n in enumerate((61, 16, 80))
]


def job_of(spec, codec, schedule=AFTER, budget=BUDGET, batch=3, policy="key_diff"):
    config = cache.make_spec(spec, policy, budget, schedule, codec=codec)
    return Job(spec, config, batch, bucket(spec, config, 80, 6), 6)


ALIKE = [
    name
    for name in codecs.names()
    if "toy" not in name and name not in ("after_prompt", "by_layer", "kivi")
]


@pytest.mark.parametrize("name", ALIKE)
def test_plans_count_all_that_is_stored(name):
    """Codes, scales, centres, places and positions, and a row's few numbers."""
    spec = tiny_spec(head_dim=64, num_kv_heads=2)
    job = job_of(spec, name, WHILE, 48, policy="streaming")
    pairs = 3 * spec.num_layers * spec.num_kv_heads * 48
    rows = 3 * 4 + 3 * spec.num_kv_heads * 4  # the next position; errors of the heads
    pair = codecs.pair_bytes(codecs.make(name), 64, "float32")
    assert state_bytes(job)["decode"] == pairs * (pair + 4) + rows


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def alike(a, b):
    """As two sizes of batch round: products of few rows may add up otherwise."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    if jnp.issubdtype(a.dtype, jnp.floating):
        one_step = float(jnp.finfo(a.dtype).eps)
        a, b = a.astype(np.float32), b.astype(np.float32)
        np.testing.assert_allclose(a, b, rtol=one_step, atol=1e-6)
    else:
        np.testing.assert_array_equal(a, b)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "schedule"),
    list(zip(PACKED, (AFTER, WHILE), strict=True)),
    ids=lambda each: getattr(each, "phases", None),
)
def test_alone_and_layer_by_layer_as_in_a_batch(tiny, name, schedule):
    """Heads of different sizes; every stored leaf moves with its pair."""
    job = job_of(tiny.spec, PACKED[name], schedule)
    together = run_batch(tiny.params, job, PROMPTS, range(3))
    found = cache.kept_positions(together.state)
    alone = dataclasses.replace(job, batch=1)
    one = run_batch(tiny.params, alone, PROMPTS[2:], [2])
    assert one.tokens[0] == together.tokens[2]
    same(cache.kept_positions(one.state)[0], found[2])
    apart = runner.run_batch(layerwise.LayerByLayer(tiny, job), PROMPTS, range(3))
    assert apart.tokens == together.tokens
    same(cache.kept_positions(apart.state), found)


@pytest.mark.e2e
@pytest.mark.parametrize("name", PACKED)
def test_pools_are_filled_with_what_is_stored(tiny, name):
    """Two prompts are read at a time and inserted: the ordinary run's state."""
    job = job_of(tiny.spec, PACKED[name])
    together = run_batch(tiny.params, job, PROMPTS, range(3))
    pooled = dataclasses.replace(job, prefill_batch=2)
    staggered = run_batch(tiny.params, pooled, PROMPTS, range(3))
    assert staggered.tokens == together.tokens
    jax.tree.map(alike, staggered.state.layers, together.state.layers)


@pytest.mark.parametrize("codec", often(["k8v4", "int4"], ["k8v4"], "e2e"))
def test_the_full_cache_takes_a_codec(tiny, codec):
    spec, options = tiny.spec, {"max_new_tokens": 6, "memory_gb": 0.1}
    few = toys.OF_8_CHANNELS[codec]
    assert cache.make_spec(spec, None, None, codec=few).codec == few
    done = kvjax.generate(tiny, PROMPTS[:1], codec=few, **options)
    (kept,) = {len(head) for layer in done[0].kept_positions for head in layer}
    assert len(done[0].tokens) == 6 and kept == 61 + 5


@pytest.mark.e2e
def test_rules_see_decoded_keys(tiny):
    """KeyDiff on values that 2 bits leave keeps others than on the true ones."""
    how = {"policy": policies.key_diff(), "budget": 24, "schedule": AFTER}
    how |= {"max_new_tokens": 2, "memory_gb": 0.1}
    kept = [
        kvjax.generate(tiny, PROMPTS[2:], codec=codec, **how)[0].kept_positions
        for codec in ("identity", codecs.rotated("identity"), codecs.int2(8))
    ]
    whole, turned, coarse = (np.array(each) for each in kept)
    np.testing.assert_array_equal(whole, turned)
    assert np.any(whole != coarse)


LATE = [
    codecs.after_prompt(PACKED["int4_outliers"]),
    codecs.after_prompt(toys.OF_8_CHANNELS["k8v4_but_ends"]),
]


def read_alone(tiny, codec, schedule=AFTER):
    """The state when the prompts are in, before a token is drawn."""
    job = job_of(tiny.spec, codec, schedule)
    engine = runner.Whole(tiny.params, job)
    return job, engine.prefill(PROMPTS).state


@pytest.mark.e2e
@pytest.mark.parametrize("codec", LATE, ids=lambda codec: codec.name)
def test_encoded_after_the_prompt(tiny, codec):
    """Exact pairs decide what stays, and what stays is encoded once."""
    plain_job, plain = read_alone(tiny, "identity")
    job, late = read_alone(tiny, codec)
    same(cache.kept_positions(plain), cache.kept_positions(late))
    for exact, found in zip(plain.layers, late.layers, strict=True):
        live = np.asarray(exact.positions) >= 0
        for name in ("key", "value"):
            tensor, read = getattr(codec, name), getattr(plain.layout, f"{name}s")
            numbers = np.asarray(tensor.decode(tensor.encode(read(exact)), np.float32))
            held = np.asarray(exact.positions)
            newest = held.max(-1, keepdims=True) - codec.residual_length
            whole = (held > newest) | (held < codec.sinks)
            numbers = np.where(whole[..., None], read(exact), numbers)
            np.testing.assert_array_equal(read(found)[live], numbers[live])
    bytes_of = state_bytes(job)
    assert bytes_of["prefill"] == state_bytes(plain_job)["prefill"]
    at_once = codec._replace(after_prompt=False)
    assert bytes_of["decode"] == state_bytes(job_of(tiny.spec, at_once))["decode"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("codec", "schedule"),
    often(
        [(codec, each) for codec in LATE for each in (AFTER, ONLY, WHILE, FULL)],
        [(LATE[0], AFTER), (LATE[1], ONLY), (LATE[0], WHILE), (LATE[1], FULL)],
        several=True,
    ),
    ids=lambda each: getattr(each, "name", None) or each.phases,
)
def test_encoded_after_the_prompt_everywhere(tiny, codec, schedule):
    """In a pool, layer by layer and in a batch."""
    kept = {"policy": None, "budget": None} if schedule == FULL else {}
    job = job_of(tiny.spec, codec, schedule, **kept)
    together = run_batch(tiny.params, job, PROMPTS, range(3))
    pooled = dataclasses.replace(job, prefill_batch=2)
    staggered = run_batch(tiny.params, pooled, PROMPTS, range(3))
    apart = runner.run_batch(layerwise.LayerByLayer(tiny, job), PROMPTS, range(3))
    for other in (staggered, apart):
        assert other.tokens == together.tokens
        same(cache.kept_positions(other.state), cache.kept_positions(together.state))


MIXED = codecs.by_layer(codecs.int4(8), "int8", first=1, last=0)


def test_layers_differ(tiny):
    job = job_of(tiny.spec, MIXED)
    found = read_alone(tiny, MIXED)[1]
    names = [layer.codec.name for layer in found.layers]
    sizes = [len(layer) for layer in job.config.heads(tiny.spec)]
    assert names == ["int8"] * sizes[0] + ["int4"] * sum(sizes[1:])
    outer, inner = (state_bytes(job_of(tiny.spec, c)) for c in ("int8", codecs.int4(8)))
    assert inner["decode"] < state_bytes(job)["decode"] < outer["decode"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "codec", [MIXED, codecs.after_prompt(MIXED)], ids=["at_once", "late"]
)
def test_layers_differ_layer_by_layer(tiny, codec):
    job = job_of(tiny.spec, codec)
    together = run_batch(tiny.params, job, PROMPTS, range(3))
    apart = runner.run_batch(layerwise.LayerByLayer(tiny, job), PROMPTS, range(3))
    assert apart.tokens == together.tokens
    kept = [cache.kept_positions(run.state) for run in (apart, together)]
    same(*kept)


def test_codecs_that_cannot_be_joined():
    late = codecs.after_prompt("int8")
    for make in (
        lambda: codecs.by_layer(late),
        lambda: codecs.by_layer("int8", MIXED),
        lambda: codecs.rotated(MIXED),
    ):
        with pytest.raises(kvjax.UserError, match=r"by_layer\("):
            make()
    for member, words in (
        (late, r"'int8_after_prompt' within pair.*after_prompt\(pair"),
        (MIXED, r"within pair.*same in all layers"),
        (codecs.kivi(), r"'kivi' within pair .*newest 128 .*give pair a residual"),
        (codecs.int8()._replace(sinks=4), r"'int8' within pair .*first 4 .*sinks"),
    ):
        for pair in ((member, "int8"), ("int8", member)):
            with pytest.raises(kvjax.UserError, match=words):
                codecs.pair(*pair)
    assert codecs.pair("kivi", "int8", 128).residual_length == 128
    for twice in ("int4_rotated", codecs.pair("int8", "int4_rotated")):
        with pytest.raises(kvjax.UserError, match=r"is rotated: .*inside"):
            codecs.rotated(twice)
