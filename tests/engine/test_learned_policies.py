"""A learned policy through whole models and layer by layer; its weights are swapped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_model
from testing.engine import run_batch

import kvjax
from kvjax import Schedule, UserError, cache, policies
from kvjax.engine import compiled, layerwise, runner
from kvjax.engine.jobs import Job, bucket
from kvjax.models import decoder
from kvjax.policies.base import scatter_new, with_params, zeros_per_slot
from kvjax.types import Stats

AFTER = Schedule("after_prefill", prefill_chunk=8)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 50, n).tolist() for n in (41, 64, 20)]


def observe_score(stats, view, observation):
    """The layer's linear score [M, K] of the hidden states, put at the new slots."""
    new = jnp.einsum("btm,mk->bkt", observation.hidden, view.params)
    return Stats(per_slot=scatter_new(view, observation, new, stats.per_slot))


SCORER = policies.Policy(
    init=lambda *shape: Stats(per_slot=zeros_per_slot(*shape)),
    observe=observe_score,
    score=lambda stats, view: stats.per_slot,
    required_stats=frozenset({"hidden"}),
    name="scorer",
)


def weights(model, seed=0):
    spec, rng = model.spec, np.random.default_rng(seed)
    shape = (spec.model_dim, spec.num_kv_heads)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(spec.num_layers)]


def job_of(model, policy, schedule=AFTER, batch=3, budget=16):
    config = cache.make_spec(model.spec, policy, budget, schedule)
    return Job(model.spec, config, batch, bucket(model.spec, config, 64, 6), 6)


def hidden_states(model, prompt):
    """What every layer's attention reads of a prompt, by the plain model."""
    full, size, seen = cache.make_spec(model.spec, None, None), len(prompt), []
    state = cache.init(model.spec, full, 1, (size,) * model.spec.num_layers)
    n = jnp.asarray([size], jnp.int32)

    def attend(index, q, k, v, ops, state):
        seen.append(np.asarray(ops.hidden[0]))
        given = index, q, k, v, ops, state
        return cache.step_layer(*given, config=full, n=n, is_prefill=True)

    tokens, positions = (
        jnp.asarray([prompt], jnp.int32),
        cache.next_positions(state, size),
    )
    decoder.forward(model.params, model.spec, tokens, positions, state, attend)
    return seen


def best(model, layers, prompt, budget=16):
    """The positions of the highest scores, by layer and head; of equals the newer.

    The first layer's are equal where a token comes again.
    """
    kept = []
    for hidden, weight in zip(hidden_states(model, prompt), layers, strict=True):
        scores = hidden @ weight  # [T, K]
        newest = -np.arange(len(scores))
        order = [np.lexsort((newest, -head))[:budget] for head in scores.T]
        kept.append([np.sort(positions) for positions in order])
    return kept


def prompt_pairs(state, prompts):
    """Of every row, the kept positions that are the prompt's."""
    rows = cache.kept_positions(state)
    return [
        [[head[head < len(prompt)] for head in layer] for layer in row]
        for row, prompt in zip(rows, prompts, strict=False)
    ]


def test_keeps_the_pairs_that_its_weights_score_highest(tiny):
    layers = weights(tiny)
    result = run_batch(
        tiny.params, job_of(tiny, with_params(SCORER, layers)), PROMPTS, range(3)
    )
    for row, prompt in zip(prompt_pairs(result.state, PROMPTS), PROMPTS, strict=True):
        jax.tree.map(np.testing.assert_array_equal, row, best(tiny, layers, prompt))


def test_other_weights_run_the_same_program(tiny):
    """Weights are arguments: the same executables serve any of these shapes."""
    results, programs = [], []
    for seed in (1, 2):
        layers = weights(tiny, seed)
        job = job_of(tiny, with_params(SCORER, layers))
        results.append((run_batch(tiny.params, job, PROMPTS, range(3)), layers))
        programs.append(compiled.programs(job))
    assert programs[0] is programs[1]
    pairs = [prompt_pairs(result.state, PROMPTS) for result, _ in results]
    for kept, (_, layers) in zip(pairs, results, strict=True):
        expected = best(tiny, layers, PROMPTS[1])
        jax.tree.map(np.testing.assert_array_equal, kept[1], expected)
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(
            jax.tree.leaves(pairs[0]), jax.tree.leaves(pairs[1]), strict=True
        )
    )


@pytest.mark.parametrize("phases", ["prefill_and_decode", "after_prefill"])
def test_layer_by_layer_is_the_whole_model(tiny, phases):
    policy = with_params(SCORER, weights(tiny))
    job = job_of(tiny, policy, Schedule(phases, prefill_chunk=8, evict_size=8))
    whole = run_batch(tiny.params, job, PROMPTS, range(3))
    found = runner.run_batch(layerwise.LayerByLayer(tiny, job), PROMPTS, range(3))
    assert found.tokens == whole.tokens
    jax.tree.map(
        np.testing.assert_array_equal,
        cache.kept_positions(found.state),
        cache.kept_positions(whole.state),
    )


def test_a_rule_knows_its_layer(tiny):
    """Even layers keep the oldest pairs, odd ones the newest."""
    by_layer = policies.Policy(
        init=lambda *shape: Stats(),
        observe=lambda stats, view, observation: stats,
        score=lambda stats, view: (
            jnp.where(jnp.asarray(view.layer) % 2 == 0, -1.0, 1.0)
            * view.positions.astype(jnp.float32)
        ),
        required_stats=frozenset(),
        name="by_layer",
    )
    (done,) = kvjax.generate(
        tiny,
        [PROMPTS[1]],
        policy=by_layer,
        budget=16,
        schedule=AFTER,
        max_new_tokens=2,
    )
    for layer, kept in enumerate(done.kept_positions):
        first = 0 if layer % 2 == 0 else len(PROMPTS[1]) - 16
        for head in kept:
            assert head.tolist()[:16] == list(range(first, first + 16))


def test_refused():
    model = tiny_model(num_layers=3)
    policy = with_params(SCORER, weights(model)[:2])
    with pytest.raises(UserError, match=r"'scorer' has weights for 2 layers"):
        cache.make_spec(model.spec, policy, 64)
