"""Layers with a sliding window keep no more than the window, whatever the policy.

What no later query sees is dropped. Under the full cache logits are therefore those of
a cache that keeps all and masks, as ours does with `windows=()`. The NumPy decoder
masks and forgets, with and without a policy.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_model
from testing import oracle, toys
from testing.engine import run_batch, score_tokens

import kvjax
from kvjax import Schedule, cache, policies
from kvjax.attention import AttentionSpec, Pairs, Queries, reference
from kvjax.cache.spec import make_spec
from kvjax.engine import footprint, layerwise, runner, scoring, steps
from kvjax.engine.compiled import programs
from kvjax.engine.jobs import Job
from kvjax.models import placement, presets
from kvjax.parallel import meshes
from kvjax.types import Observation, Scoring, View

WINDOWS = (6, 0, 11)  # local, global, local, as in Gemma 2
LENGTHS = (3, 6, 7, 23, 0, 40)  # below, at and above the window; one row unused
PROMPT, NEW = 40, 15
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 50, length).tolist() for length in LENGTHS]
GIVEN = RNG.integers(0, 50, (len(LENGTHS), NEW))


@functools.cache
def model():
    return tiny_model(num_layers=len(WINDOWS), sliding_windows=WINDOWS)


def full(block, **options):
    return make_spec(model().spec, None, None, Schedule("none", block), **options)


def masked(config):
    return dataclasses.replace(config, windows=())


def read(config):
    """The state after the prompts, and the logits that follow them."""
    spec, params = model().spec, model().params
    tokens = np.zeros((len(PROMPTS), PROMPT), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    capacity = config.prefill_capacity(spec, PROMPT, NEW)
    state = cache.init(spec, config, len(PROMPTS), capacity)
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    how = {"spec": spec, "config": config}
    return steps.prefill(params, state, jnp.asarray(tokens), lengths, **how)


def in_reach(count):
    """Of every layer, the positions that the newest of `count` tokens sees."""
    return [list(range(max(count - (w or count), 0), count)) for w in WINDOWS]


def kept(state, row):
    heads = cache.kept_positions(state)[row]
    assert all(np.array_equal(a, b) for a, b in heads), "heads of a layer differ"
    return [layer[0].tolist() for layer in heads]


@pytest.mark.parametrize("block", often((1, 4, 6, 16, 40), (4,), others="e2e"))
def test_logits_are_those_of_all_pairs_masked(block):
    """Blocks smaller than, equal to and above the window; decoding far past it."""
    spec, params, config = model().spec, model().params, full(block)
    whole = PROMPT + NEW
    slots = tuple(min(whole, w + block) if w else whole for w in WINDOWS)
    assert config.prefill_capacity(spec, PROMPT, NEW) == slots
    state, first = read(config)
    for row, length in enumerate(LENGTHS):
        assert kept(state, row) == in_reach(length)
    given = jnp.asarray(GIVEN, jnp.int32)
    end, rest = score_tokens(params, state, given, spec=spec, config=config)
    cache.raise_errors(end)
    found = np.concatenate([first[None], rest])
    for row in (0, 2, 5):
        by_hand = oracle.Decoder(spec, params, None, None, block)
        expected = [by_hand.prefill(PROMPTS[row])]
        expected += [by_hand.step([token]) for token in GIVEN[row]]
        np.testing.assert_allclose(found[:, row], expected, atol=2e-5)
        assert kept(end, row) == in_reach(LENGTHS[row] + NEW)


@pytest.mark.parametrize("block", [4, pytest.param(32, marks=pytest.mark.e2e)])
def test_given_tokens_at_once(block):
    """Blocks of them never exceed the prompt's, for which the slots are made."""
    found = []
    for config in (full(block), masked(full(block))):
        how = {"spec": model().spec, "config": config}
        state, logits = read(config)
        lengths = jnp.asarray((15, 0, 9, 15, 0, 15), jnp.int32)
        given = logits, jnp.asarray(GIVEN, jnp.int32), lengths
        state, scores = scoring.score(model().params, state, *given, **how)
        cache.raise_errors(state)
        found.append(scores.logprob)
    np.testing.assert_allclose(*found, atol=2e-5)


@pytest.mark.e2e
def test_batched_is_single_and_masked():
    """Tokens and, but for what is masked, pairs."""
    prompts = [prompt for prompt in PROMPTS if prompt]
    job = Job(model().spec, full(8), len(prompts), 128, NEW)
    together = run_batch(model().params, job, prompts, range(len(prompts)))
    all_kept = dataclasses.replace(job, config=masked(job.config))
    expected = run_batch(model().params, all_kept, prompts, range(len(prompts)))
    assert together.tokens == expected.tokens
    assert [len(layer) for layer in kept(expected.state, 4)] == [PROMPT + NEW - 1] * 3
    one = dataclasses.replace(job, batch=1)
    for row, prompt in enumerate(prompts):
        assert kept(together.state, row) == in_reach(len(prompt) + NEW - 1)
        alone = run_batch(model().params, one, [prompt], [row])
        assert alone.tokens == [together.tokens[row]]
        assert kept(alone.state, 0) == kept(together.state, row)


STORED = {
    "halves": {"layout": toys.HALVES},
    "codec": {"codec": toys.HALVED_BUT_ENDS},
}


@pytest.mark.e2e
@pytest.mark.parametrize("stored", STORED)
def test_other_layouts_and_codecs(stored):
    """A codec's newest pairs lie elsewhere, and are found by their positions."""
    config = full(8, **STORED[stored])
    (state, found), (_, expected) = read(config), read(masked(config))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert kept(state, 5) == in_reach(PROMPT)


@pytest.mark.e2e
@pytest.mark.parametrize("phases", ["none", "after_prefill"])
def test_layer_by_layer_is_the_whole_model(phases):
    """Under a policy too."""
    policy, budget = (None, None) if phases == "none" else (policies.recency(), 20)
    config = make_spec(model().spec, policy, budget, Schedule(phases, 8, 8))
    prompts = [prompt for prompt in PROMPTS if prompt]
    job = Job(model().spec, config, len(prompts), 128, NEW)
    whole = run_batch(model().params, job, prompts, range(len(prompts)))
    found = runner.run_batch(
        layerwise.LayerByLayer(model(), job), prompts, range(len(prompts))
    )
    assert found.tokens == whole.tokens
    assert cache.capacities(found.state)[0] == 6 + 8
    for row in range(len(prompts)):
        assert kept(found.state, row) == kept(whole.state, row)


@pytest.mark.e2e
def test_a_rule_s_pool_is_its_fixed_batch():
    """What is read group by group forgets in its pool, too."""
    schedule = Schedule("after_prefill", 8)
    config = make_spec(model().spec, policies.h2o(), 20, schedule)
    job = Job(model().spec, config, 5, 128, NEW)
    prompts = [prompt for prompt in PROMPTS if prompt]
    pool = dataclasses.replace(job, prefill_batch=2)
    one, other = (run_batch(model().params, j, prompts, range(5)) for j in (job, pool))
    assert one.tokens == other.tokens
    same = map(cache.kept_positions, (one.state, other.state))
    jax.tree.map(np.testing.assert_array_equal, *same)


@pytest.mark.e2e
def test_over_a_mesh():
    prompts = [prompt for prompt in PROMPTS if prompt]
    how = {"policy": None, "max_new_tokens": NEW, "memory_gb": 0.1}
    how |= {"schedule": Schedule("none", 8)}
    alone = kvjax.generate(model(), prompts, **how)
    over = meshes.mesh("data:4,model:2", model().spec.num_kv_heads)
    params = placement.split(model().spec, model().params, over)
    spec = placement.fitted(model().spec, over)
    parted = model()._replace(spec=spec, params=params)
    for one, other in zip(alone, kvjax.generate(parted, prompts, **how), strict=True):
        assert one.tokens == other.tokens
        same = one.kept_positions, other.kept_positions
        jax.tree.map(np.testing.assert_array_equal, *same)


@pytest.mark.e2e
def test_the_state_lives_in_place():
    spec = dataclasses.replace(
        model().spec, head_dim=64, context_length=4096, sliding_windows=(500, 0, 500)
    )
    config = make_spec(spec, None, None, Schedule("none", 16))
    job = Job(spec, config, 4, 1024, 16)
    size = footprint.state_bytes(job)["decode"]
    compiled = programs(job)
    for program in (compiled.prefill, compiled.decode):
        memory = program.memory_analysis()
        assert abs(memory.alias_size_in_bytes - size) < 0.01 * size
        assert memory.temp_size_in_bytes < 0.25 * size


def test_mistral_takes_half():
    """Batch 32, 8,192 tokens: 4,096 pairs per head and a block of 64."""
    spec = presets.spec("mistral-7b")
    job = Job(spec, make_spec(spec, None, None), 32, 8192 - 256, 256, "bfloat16")
    all_kept = dataclasses.replace(job, config=masked(job.config))
    held, before = (footprint.state_bytes(each) for each in (job, all_kept))
    pair = 2 * 2 * spec.head_dim + 4  # a key, a value and a position
    slots = 32 * spec.num_layers * spec.num_kv_heads
    rows = 32 * (4 + 4 * spec.num_kv_heads)
    assert held["prefill"] == held["decode"] == slots * 4160 * pair + rows
    assert before["prefill"] == slots * 8192 * pair + rows


@pytest.mark.e2e
def test_slots_that_give_positions_move_together():
    """Keys that are turned by their slots stay in order, and in the same room."""
    config = full(8, rope_positions="cache")
    assert config.prefill_capacity(model().spec, PROMPT, NEW) == (14, 55, 19)
    (state, found), (_, expected) = read(config), read(masked(full(8)))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert kept(state, 5) == in_reach(PROMPT)


POLICIES = ("average_attention", "key_diff", "h2o", "streaming")
SMALL_AND_LARGE = (12, 20)  # below 11 + 4, where a window's layer evicts, and above


@pytest.mark.parametrize(
    ("name", "budget"),
    often(
        [(name, budget) for name in POLICIES for budget in SMALL_AND_LARGE],
        [("key_diff", 12), ("average_attention", 20)],
        others="e2e",
        several=True,
    ),
)
def test_policies_choose_within_windows(name, budget):
    """Algorithm 1 by a decoder whose layers forget what has left their windows."""
    spec, params = model().spec, model().params
    config = make_spec(spec, name, budget, Schedule("prefill_and_decode", 4, 4))
    sizes = tuple(min(budget, w + 4) if w else budget for w in WINDOWS)
    assert config.budget == config.prefill_capacity(spec, PROMPT, NEW) == sizes
    assert config.decode_capacity(spec, PROMPT, NEW) == sizes
    state, first = read(config)
    given = jnp.asarray(GIVEN, jnp.int32)
    at_prompt = [kept_by_head(state, row) for row in range(len(PROMPTS))]
    end, rest = score_tokens(params, state, given, spec=spec, config=config)
    cache.raise_errors(end)
    found = np.concatenate([first[None], rest])
    for row in (2, 3, 5):
        rule = getattr(oracle, name)()
        by_hand = oracle.Decoder(spec, params, rule, sizes, 4)
        by_hand.first = 4  # blocks of 4 fill the layer without a window exactly
        expected = [by_hand.prefill(PROMPTS[row])]
        assert at_prompt[row] == by_hand.kept()
        expected += [by_hand.step([token]) for token in GIVEN[row]]
        np.testing.assert_allclose(found[:, row], expected, atol=5e-5)
        assert kept_by_head(end, row) == by_hand.kept()


def kept_by_head(state, row):
    heads = cache.kept_positions(state)[row]
    return [[head.tolist() for head in layer] for layer in heads]


@pytest.mark.parametrize("policy", [None, "key_diff"])
def test_no_window_takes_more_than_itself_and_a_block(policy):
    """In every phase of every schedule, with the first block as printed too."""
    spec, every = model().spec, ("prefill_and_decode", "prefill_only", "after_prefill")
    for phases in ("none",) if policy is None else (*every, "decode_only"):
        for first in ("remainder", "budget"):
            schedule = Schedule(phases, 4, 4, first)
            config = make_spec(spec, policy, policy and 30, schedule)
            assert config.first_chunk <= 6 + 4  # it fits the smallest layer
            for slots in (config.prefill_capacity, config.decode_capacity):
                local, _, other = slots(spec, PROMPT, NEW)
                assert (local, other) == (6 + 4, 11 + 4)


def test_a_mean_goes_to_the_layers_without_a_window():
    """What windows leave of it; an int without a rule is the most of any head."""
    spec = model().spec  # windows of 6, none and 11; the default block at 20 is 8
    schedule = Schedule("after_prefill", 8)
    made = functools.partial(make_spec, spec, "key_diff", schedule=schedule)
    assert made(20).budget == (14, 20, 19)
    assert made(20, budget_rule="uniform").budget == (14, 27, 19)
    assert made(20, budget_rule="uniform", length=24).budget == (14, 24, 19)
    assert made((20, 20, 9)).budget == (14, 20, 9)
    pairs = 40 + 6 + 11  # that the full cache keeps of 40 tokens: a mean of 19
    even = made("100%", length=40, budget_rule="uniform")
    assert even.budget == (14, 24, 19) and sum(even.budget) == pairs
    same_share = made("50%", length=400, budget_rule="proportional")
    assert same_share.budget == (3, 201, 6)  # 210 pairs as 6 to 400 to 11
    with pytest.warns(UserWarning, match="budget_rule='proportional'"):
        assert made("50%", length=400) == same_share


def test_short_texts_take_no_more_than_they_need():
    sizes = full(8).decode_capacity(model().spec, 9, 2)
    assert sizes == (11, 11, 11)


def test_the_largest_layers_stand_for_temporaries():
    """Two layers are compiled for all; the first of Gemma 3's are all local."""
    spec = dataclasses.replace(model().spec, sliding_windows=(6, 6, 0))
    job = Job(spec, make_spec(spec, None, None), 1, 128, NEW)
    short = footprint._largest_layers(job, 2)
    assert short.prefill_capacity == (70, 143)
    assert short.spec.sliding_windows == short.config.windows == (6, 0)


@pytest.mark.parametrize(
    "scoring", [Scoring(), Scoring(2.0, 0), Scoring(0.0, 5), Scoring(2.0, 5)], ids=str
)
def test_rules_weigh_pairs_as_the_layer_does(scoring):
    """What SnapKV computes again is attention's own, capped and within the window."""
    draw = lambda *shape: jnp.asarray(RNG.normal(size=shape) * 2, jnp.float32)
    q, k = draw(1, 2, 3, 4, 8), draw(1, 2, 12, 8)
    at = jnp.arange(8, 12)[None]  # the queries are those of the newest 4
    pos = jnp.broadcast_to(jnp.arange(12), (1, 2, 12))
    n = jnp.asarray([4])
    _, seen = reference.attend(
        Queries(q, at, n),
        Pairs(k, k, pos),
        AttentionSpec(frozenset({"attn_weights"}), scoring=scoring),
    )
    spec = dataclasses.replace(model().spec, num_heads=6, num_kv_heads=2, head_dim=8)
    view = View(pos, n + 7, n[None] + 4, lambda: k, scoring=scoring)
    policy = policies.snapkv(window=4, kernel=1)
    observed = Observation(n, at, queries=q)
    stats = policy.observe(policy.init(spec, 1, 12), view, observed)
    score = policy.score(stats, view)[:, :, :8]
    mean = jnp.mean(seen.attn_weights, axis=(2, 3))[:, :, :8]
    np.testing.assert_allclose(score, mean, rtol=1e-5, atol=1e-7)
    if scoring.local_window:
        assert not score[:, :, :4].any() and score[:, :, 5:].all()
        share = policies.r_kv(window=4, kernel=1, weight=1.0).score(stats, view)
        assert not share[:, :, :4].any() and share[:, :, 5:8].all()


def test_rules_are_told_what_a_layer_does_to_its_products():
    """In every step and in the compaction, of the whole model or of one layer."""
    found = []

    def score(stats, view):
        found.append((view.layer, view.scoring))
        return view.positions.astype(jnp.float32)

    policy = policies.recency()._replace(score=score, name="told")
    spec = dataclasses.replace(model().spec, attention_softcap=4.0)
    expected = {(i, Scoring(4.0, window)) for i, window in enumerate(WINDOWS)}
    tokens, lengths = jnp.zeros((1, 16), jnp.int32), jnp.asarray([16])
    for phases in ("prefill_only", "after_prefill"):
        config = make_spec(spec, policy, 8, Schedule(phases, 4))
        how = {"spec": spec, "config": config}
        room = config.prefill_capacity(spec, 16, NEW)
        found.clear()
        state = jax.eval_shape(lambda c=config, r=room: cache.init(spec, c, 1, r))
        read = functools.partial(steps.prefill, **how)
        state, _ = jax.eval_shape(read, model().params, state, tokens, lengths)
        room = config.decode_capacity(spec, 16, NEW)
        jax.eval_shape(functools.partial(steps.compact, **how, capacity=room), state)
        assert set(found) == expected
    found.clear()
    for index in range(len(WINDOWS)):  # as where layers are read one after the other
        group = state.layers[index], state.stats[index], state.error, state.next_pos
        how = {"spec": spec, "config": config.of_layer(index), "like": index}
        shrink = functools.partial(layerwise._compact, **how, capacity=room[:1])
        jax.eval_shape(shrink, group, None, jnp.int32(index), None)
    assert [scoring for _, scoring in found] == [Scoring(4.0, each) for each in WINDOWS]
