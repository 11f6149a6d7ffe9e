"""Heads with different budgets keep what they keep among heads of the same budget."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_model
from testing import layer, oracle, toys
from testing.engine import decode, run_batch
from testing.rules import POLICIES

import kvjax
from kvjax import Schedule, UserError, cache, policies
from kvjax.cache import head_groups
from kvjax.cache.spec import make_spec
from kvjax.engine import layerwise, likelihood
from kvjax.engine.footprint import phase_bytes, state_bytes
from kvjax.engine.jobs import Job, bucket
from kvjax.engine.steps import prefill
from kvjax.parallel import meshes

BLOCK, PROMPT, NEW = 8, 104, 20
LENGTHS = (5, 56, 73, 101, 0, 57, 88, 30)  # around the sizes; one row unused
SIZES = (56, 88, 56, 88)
SCHEDULES = ("prefill_and_decode", "after_prefill", "decode_only")
SPEC = layer.spec_of(heads=4, group=2, depth=8)
DATA = layer.random_data(SPEC, len(LENGTHS), PROMPT + NEW, seed=0)
ALONE = [  # what they keep in a head does not depend on the others, nor on their sizes
    name
    for name, policy in POLICIES.items()
    if not policy.needs_all_heads and name != "retrieval_heads"
]
CASES = [(name, SCHEDULES[i % 3]) for i, name in enumerate(ALONE)]
CASES += [("h2o", "prefill_only")]
QUICK = [CASES[ALONE.index(name)] for name in ("average_attention", "snapkv")]
OFTEN = ("random", "key_diff", "fastgen", "scissorhands", "expected_attention", "r_kv")
LATER = [CASES[ALONE.index(name)] for name in OFTEN]
STORED = {
    "dense": {},
    "halves": {"layout": toys.HALVES},
    "halved_but_ends": {"codec": toys.HALVED_BUT_ENDS},
    "int4_outliers": {"codec": toys.OF_8_CHANNELS["int4_outliers"]},
}


def kept(name, phases, budget, over=None, **options):
    """`[moment][row][head]` -> positions after the prompt, its compaction, the end."""
    schedule = Schedule(phases, prefill_chunk=BLOCK, evict_size=BLOCK)
    config = make_spec(SPEC, POLICIES[name], (budget,), schedule, **options)
    moments, end = layer.run(SPEC, config, DATA, LENGTHS, PROMPT, over)
    assert cache.capacities(end) == config.decode_capacity(SPEC, PROMPT, NEW)
    return [[row[0] for row in moment] for moment in moments]


@pytest.mark.parametrize(
    ("name", "phases"),
    often(QUICK + LATER, QUICK, others="e2e", several=True)
    + often([each for each in CASES if each not in QUICK + LATER], [], several=True),
)
def test_every_head_keeps_what_it_keeps_among_its_equals(name, phases):
    apart = kept(name, phases, SIZES)
    for size in set(SIZES):
        alike = kept(name, phases, size)
        for moment, expected in zip(apart, alike, strict=True):
            for row, found in zip(expected, moment, strict=True):
                for head in np.flatnonzero(np.equal(SIZES, size)):
                    np.testing.assert_array_equal(found[head], row[head])


@pytest.mark.parametrize("stored", often(STORED, ["halves"], others="e2e"))
def test_in_every_layout_and_codec(stored):
    how = "key_diff", "prefill_and_decode"
    others = kept(*how, SIZES, **STORED[stored])
    if "codec" not in STORED[stored]:
        jax.tree.map(np.testing.assert_array_equal, others, kept(*how, SIZES))
    for size in set(SIZES):
        alike = kept(*how, size, **STORED[stored])
        for head in np.flatnonzero(np.equal(SIZES, size)):
            for row, found in zip(alike[-1], others[-1], strict=True):
                np.testing.assert_array_equal(found[head], row[head])


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["snapkv", "average_attention", "random"])
def test_over_a_mesh(name):
    """Each of two devices has a head of either size."""
    how, over = (name, "prefill_and_decode"), meshes.mesh("data:4,model:2", 4)
    split = kept(*how, SIZES, over=over)
    jax.tree.map(np.testing.assert_array_equal, split, kept(*how, SIZES))


# ------------------------------------------------------------------- whole models

BUDGET = ((16, 40), (32, 24))


AVERAGE = policies.average_attention(), oracle.average_attention()
SIZED = policies.criticalkv(AVERAGE[0]), oracle.criticalkv(AVERAGE[1])


@pytest.mark.parametrize(
    ("policy", "rule"), often([AVERAGE, SIZED], [SIZED], "e2e", True)
)
def test_kept_positions_are_algorithm_1_s(tiny, policy, rule, p=8):
    """By weights, and by these and what values add by the model's own projection."""
    config = make_spec(tiny.spec, policy, BUDGET, Schedule(prefill_chunk=p))
    rng = np.random.default_rng(0)
    for length in (14, 16, 61):
        prompt = rng.integers(0, tiny.spec.vocab_size, length)
        by_hand = oracle.Decoder(tiny.spec, tiny.params, rule, BUDGET, p)
        logits = by_hand.prefill(prompt)
        state, found = read_as_by_hand(tiny, config, prompt, by_hand.kept(), logits)
        active, keys = jnp.ones((1,), bool), jax.random.split(jax.random.key(0), 1)
        how = {"spec": tiny.spec, "config": config, "count": 21}
        state, out = decode(tiny.params, state, found, active, keys, **how)
        for token in out[0].tolist()[:-1]:
            by_hand.step([token])
        assert as_lists(cache.kept_positions(state)[0]) == by_hand.kept()


def test_large_heads_follow_one_rule_and_small_ones_another(tiny):
    """Of BUDGET, whose mean is 28, the head with 40; by hand, and layer by layer."""
    p, policy = 8, policies.retrieval_heads(above=1.2)
    config = make_spec(tiny.spec, policy, BUDGET, Schedule(prefill_chunk=p))
    large, small = oracle.key_diff(), oracle.average_attention()

    def rule(heads, now, keep):
        scores = zip(
            keep, large(heads, now, keep), small(heads, now, keep), strict=True
        )
        return [by_keys if n == 40 - p else by_mass for n, by_keys, by_mass in scores]

    prompt = np.random.default_rng(1).integers(0, tiny.spec.vocab_size, 61)
    by_hand = oracle.Decoder(tiny.spec, tiny.params, rule, BUDGET, p)
    logits = by_hand.prefill(prompt)
    read_as_by_hand(tiny, config, prompt, by_hand.kept(), logits)
    alike = make_spec(tiny.spec, policy, 28, Schedule(prefill_chunk=p))
    by_keys = make_spec(tiny.spec, policies.key_diff(), 28, alike.schedule)
    states = (after_prompt(tiny, each, prompt)[0] for each in (alike, by_keys))
    jax.tree.map(np.testing.assert_array_equal, *map(cache.kept_positions, states))


def read_as_by_hand(model, config, prompt, kept, logits):
    """Checks a prefill, whole and layer by layer; returns its state and logits."""
    state, found = after_prompt(model, config, prompt)
    assert as_lists(cache.kept_positions(state)[0]) == kept
    np.testing.assert_allclose(found[0], logits, atol=1e-3)
    alone = layerwise.prefill(model, config, [prompt.tolist()], 21)
    assert as_lists(cache.kept_positions(alone.state)[0]) == kept
    return state, found


def after_prompt(model, config, prompt, room=72):
    tokens = jnp.asarray(np.pad(prompt, (0, room - len(prompt)))[None], jnp.int32)
    lengths = jnp.asarray([len(prompt)], jnp.int32)
    capacity = config.prefill_capacity(model.spec, room, 21)
    state = cache.init(model.spec, config, 1, capacity)
    how = {"spec": model.spec, "config": config}
    return prefill(model.params, state, tokens, lengths, **how)


def as_lists(found):
    return [[head.tolist() for head in heads] for heads in found]


PROMPTS = [
    np.random.default_rng(i).integers(0, 50, n).tolist()
    for i, n in enumerate((61, 16, 80))
]


def job_of(spec, name, phases, budget, batch):
    schedule = Schedule(phases, prefill_chunk=BLOCK, evict_size=BLOCK)
    config = make_spec(spec, policies.make(name), budget, schedule)
    return Job(spec, config, batch, bucket(spec, config, 80, 12), 12)


@pytest.mark.parametrize(
    ("name", "phases"),
    often(
        [("key_diff", "prefill_and_decode"), ("h2o", "after_prefill")],
        [("key_diff", "prefill_and_decode")],
        others="e2e",
        several=True,
    ),
)
def test_alone_and_layer_by_layer_as_in_a_batch(tiny, name, phases):
    together = run_batch(
        tiny.params, job_of(tiny.spec, name, phases, BUDGET, 3), PROMPTS, range(3)
    )
    found = cache.kept_positions(together.state)
    for index, prompt in enumerate(PROMPTS):
        job = job_of(tiny.spec, name, phases, BUDGET, 1)
        alone = run_batch(tiny.params, job, [prompt], [index])
        assert alone.tokens[0] == together.tokens[index]
        same(cache.kept_positions(alone.state)[0], found[index])
    job = job_of(tiny.spec, name, phases, BUDGET, 3)
    apart = kvjax.engine.runner.run_batch(
        layerwise.LayerByLayer(tiny, job), PROMPTS, range(3)
    )
    assert apart.tokens == together.tokens
    same(cache.kept_positions(apart.state), found)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.e2e
def test_texts_are_judged_alike_whatever_their_batch(tiny):
    config = job_of(tiny.spec, "h2o", "prefill_and_decode", BUDGET, 1).config
    given = [(prompt, prompt[::-1][:9]) for prompt in PROMPTS]
    memory = 1_000_000_000
    together = likelihood.likelihoods(tiny, config, given, memory)
    alone = [likelihood.likelihoods(tiny, config, [one], memory)[0] for one in given]
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a.logprob, b.logprob, rtol=1e-5)


def test_memory_is_what_the_sizes_say():
    """The same total takes the same bytes, but for what one layer works with."""
    model = tiny_model(num_kv_heads=3, num_heads=3, head_dim=64, num_layers=4)
    first = (128, 128, 512), (64, 320, 384), 256, 256
    budgets = 256, first, ((96, 192, 480), 256, 256, 256), ((256, 256, 128), *first[1:])
    alike, *apart, less = (
        job_of(model.spec, "key_diff", "prefill_and_decode", budget, 4)
        for budget in budgets
    )
    stored = state_bytes(alike)["decode"]
    for job in apart:
        assert state_bytes(job)["decode"] == stored
        found, expected = (phase_bytes(each) for each in (job, alike))
        assert found["decode"] == pytest.approx(expected["decode"], rel=0.05)
    pair = 2 * 64 * 4 + 4
    assert stored - state_bytes(less)["decode"] == 4 * 128 * pair


def test_one_size_for_all_heads_is_one_part(tiny):
    config = make_spec(tiny.spec, policies.h2o(), ((32, 32), 24))
    assert config.budget == (32, 24)
    assert head_groups.of_sizes((8, 40, 8)) == ((0, 2), (1,))


def test_refused(tiny):
    def config(budget, policy=None, **options):
        return make_spec(tiny.spec, policy or policies.h2o(), budget, **options)

    with pytest.raises(UserError, match=r"has 3 sizes for the 2 KV heads of tiny"):
        config(((8, 8, 8), 24))
    with pytest.raises(UserError, match=r"'simlayerkv' compares the heads"):
        config(((32, 40), 24), policies.simlayerkv())
    with pytest.raises(UserError, match=r"budget is 'many': give a whole number"):
        config(((32, "many"), 24))
    with pytest.raises(UserError, match=r"pins 40 pairs, but an eviction at budget 32"):
        config(((32, 64), 64), policies.protect(policies.h2o(), 20, 20))
    job = job_of(tiny.spec, "h2o", "after_prefill", BUDGET, 4)
    over = meshes.mesh("data:4,model:2", 2)
    with pytest.raises(UserError, match=r"each of which has to keep the same"):
        dataclasses.replace(job, mesh=over)
