"""Layer by layer, a model draws and keeps what its whole program does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often
from testing import toys
from testing.engine import run_batch, score_tokens

from kvjax import Schedule, UserError, cache, policies
from kvjax.cache.spec import make_spec
from kvjax.engine import layerwise, runner
from kvjax.engine.jobs import Job, bucket
from kvjax.engine.prefill_cache import PrefillCache
from kvjax.engine.scoring import score
from kvjax.engine.steps import compact, prefill
from kvjax.policies.base import head_numbers, stateless

NEW = 9
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 50, length).tolist() for length in (30, 64, 47)]
METHODS = [
    (None, "none", {}),
    (policies.average_attention(), "prefill_and_decode", {}),
    (policies.key_diff(), "decode_only", {}),
    (policies.snapkv(window=5), "after_prefill", {}),
    (policies.h2o(), "after_prefill", {}),
    (policies.expected_attention(), "after_prefill", {}),
    (policies.streaming(), "after_prefill", {"rope_positions": "cache"}),
    (policies.average_attention(), "prefill_only", {}),
]


def compressions(spec):
    return [
        make_spec(
            spec, policy, 24 if policy else None, Schedule(phases, 8, 8), **options
        )
        for policy, phases, options in METHODS
    ]


@pytest.fixture(scope="module")
def shared(tiny):
    """Shared by all methods, as in a sweep."""
    return PrefillCache(tiny, compressions(tiny.spec))


def written(tiny, shared, config, **changes):
    job = Job(tiny.spec, config, len(PROMPTS), 64, NEW, **changes)
    return runner.run_batch(shared.runner(job), PROMPTS, range(len(PROMPTS)))


@pytest.mark.parametrize("index", often(range(len(METHODS)), [0, 1, 3, 6], "e2e"))
def test_same_tokens_and_pairs(tiny, shared, index):
    config = compressions(tiny.spec)[index]
    size = bucket(tiny.spec, config, 64, NEW)
    whole = run_batch(
        tiny.params, Job(tiny.spec, config, 3, size, NEW), PROMPTS, range(3)
    )
    found = written(tiny, shared, config)
    assert found.tokens == whole.tokens
    jax.tree.map(
        np.testing.assert_array_equal,
        cache.kept_positions(found.state),
        cache.kept_positions(whole.state),
    )


@pytest.mark.parametrize("index", often([1, 3], [3], "e2e"))
def test_same_logits(tiny, shared, index):
    """Teacher forcing, with select_evictions while writing and without."""
    config, spec = compressions(tiny.spec)[index], tiny.spec
    prompts, given = [PROMPTS[1]], RNG.integers(0, 50, (1, NEW))
    tokens = jnp.asarray(prompts, jnp.int32)
    state = cache.init(spec, config, 1, config.prefill_capacity(spec, 64, NEW))
    lengths = jnp.asarray([64], jnp.int32)
    state, first = prefill(
        tiny.params, state, tokens, lengths, spec=spec, config=config
    )
    if config.schedule.compacts:
        capacity = config.decode_capacity(spec, 64, NEW)
        state = compact(state, spec=spec, config=config, capacity=capacity)
    forced = jnp.asarray(given, jnp.int32)
    _, rest = score_tokens(tiny.params, state, forced, spec=spec, config=config)
    whole = np.concatenate([np.asarray(first)[None], np.asarray(rest)])[:, 0]
    more = np.concatenate([given, [[0]]], axis=1)  # judged last, and never fed
    job = Job(spec, config, 1, 64, NEW)
    alone = shared.runner(job)
    found = alone.score(alone.prefill(prompts), more, np.asarray([NEW + 1]))
    np.testing.assert_allclose(found.logits[:, 0], whole, atol=1e-5)
    state, same = score(
        tiny.params,
        state,
        first,
        jnp.asarray(more, jnp.int32),
        jnp.asarray([NEW + 1], jnp.int32),
        spec=spec,
        config=config,
        keep_logits=True,
    )
    np.testing.assert_allclose(same.logits[:, 0], whole, atol=1e-5)
    np.testing.assert_allclose(same.logprob, found.logprob, atol=1e-5)
    np.testing.assert_array_equal(same.greedy, found.greedy)


def test_one_prefill_serves_all_policies(tiny, monkeypatch):
    config = compressions(tiny.spec)[3:6]
    fresh, count = PrefillCache(tiny, config), []
    read = layerwise.prefill
    monkeypatch.setattr(
        layerwise, "prefill", lambda *args: count.append(1) or read(*args)
    )
    for each in config:
        fresh.prefill(each, PROMPTS, NEW)
    assert len(count) == 1


def test_prefills_beyond_the_limit_are_repeated(tiny, monkeypatch):
    """With the same result."""
    config, other = compressions(tiny.spec)[3], [PROMPTS[0]]
    free = PrefillCache(tiny, [config])
    whole = [free.prefill(config, prompts, NEW) for prompts in (PROMPTS, other)]
    held = sum(x.nbytes for x in jax.tree.leaves(next(iter(free._kept.values()))))
    tight, count = PrefillCache(tiny, [config], held_bytes=held), []
    read = layerwise.prefill
    monkeypatch.setattr(
        layerwise, "prefill", lambda *args: count.append(1) or read(*args)
    )
    for _ in range(2):
        found = [tight.prefill(config, prompts, NEW) for prompts in (PROMPTS, other)]
    assert len(count) == 3, "the first batch once, the second for each"
    for one, same in zip(whole, found, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, same)


def test_methods_of_one_chunk_size_share_a_prefill(tiny):
    """Their budgets may differ."""
    config = compressions(tiny.spec)[3]
    other = make_spec(tiny.spec, config.policy, 24, Schedule("after_prefill", 16, 16))
    fresh = PrefillCache(tiny, [config, other])
    fresh.prefill(config, PROMPTS, NEW)
    fresh.prefill(other, PROMPTS, NEW)
    assert len(fresh._kept) == 2
    uneven = make_spec(tiny.spec, config.policy, (16, 24), config.schedule)
    state = fresh.prefill(uneven, PROMPTS, NEW).state
    assert len(fresh._kept) == 2
    kept = cache.kept_positions(state)
    assert [[len(head) for head in layer] for layer in kept[0]] == [[16] * 2, [24] * 2]


def test_head_groups_of_one_size_share_programs_and_know_their_heads(tiny):
    """The policy scores by the layer and by the head's number in it."""

    def score(view):
        sign = 1 - 2 * ((head_numbers(view) + view.layer) % 2)
        return (view.positions * sign[None, :, None]).astype(jnp.float32)

    rule = stateless("by_head", score)
    sizes = (16, 24), (24, 16)
    config = make_spec(tiny.spec, rule, sizes, Schedule("prefill_and_decode", 8, 8))
    size = bucket(tiny.spec, config, 64, NEW)
    job = Job(tiny.spec, config, 3, size, NEW)
    whole = run_batch(tiny.params, job, PROMPTS, range(3))
    layerwise._attend.clear_cache()
    placed = jax.device_put(tiny.params, jax.devices()[0])  # as `kvjax.load` does
    layers = layerwise.LayerByLayer(tiny._replace(params=placed), job)
    found = runner.run_batch(layers, PROMPTS, range(3))
    kept = cache.kept_positions(whole.state)
    jax.tree.map(np.testing.assert_array_equal, cache.kept_positions(found.state), kept)
    assert [[head.min() > 40 for head in layer] for layer in kept[1]] == [
        [True, False],
        [False, True],
    ], "even ones keep the newest"
    assert layerwise._attend._cache_size() == 4, "two sizes, reading and writing"


def test_fewer_prompts_than_rows(tiny, shared):
    """As the last batch of many may have."""
    config = compressions(tiny.spec)[1]
    all_of_them = written(tiny, shared, config)
    job = Job(tiny.spec, config, 5, 64, NEW)
    found = runner.run_batch(shared.runner(job), PROMPTS, range(len(PROMPTS)))
    assert found.tokens == all_of_them.tokens


def test_a_rule_that_measures_all_layers_first_is_refused(tiny):
    rule = toys.loudest_layers()
    schedule = Schedule("after_prefill")
    config = make_spec(tiny.spec, policies.h2o(), 24, schedule, budget_rule=rule)
    with pytest.raises(UserError, match=r"'loudest_layers' measures all layers"):
        PrefillCache(tiny, [config])


def test_an_end_token_stops_a_row(tiny, shared):
    config = compressions(tiny.spec)[1]
    free = written(tiny, shared, config)
    end = free.tokens[0][3]
    cut = written(tiny, shared, config, eos=(end,))
    for whole, short in zip(free.tokens, cut.tokens, strict=True):
        stop = whole.index(end) + 1 if end in whole else NEW
        assert short == whole[:stop]
