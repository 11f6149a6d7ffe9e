"""Budget rules: sizes that add up, measured in the layers, re-allocated in between."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_model, tiny_spec
from testing import toys
from testing.engine import run_batch

import kvjax
from kvjax import Schedule, UserError, cache, policies
from kvjax.cache import budgets
from kvjax.engine import compiled, steps
from kvjax.engine.jobs import Job, bucket
from kvjax.models import decoder

AFTER = Schedule("after_prefill", prefill_chunk=8)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 50, n).tolist() for n in (61, 40, 80)]


@pytest.fixture(scope="module")
def four():
    return tiny_model(num_layers=4)


def test_uniform_and_explicit(tiny):
    """One int is uniform; one per layer is explicit: the same pairs stay."""
    options = {"policy": policies.key_diff(), "schedule": AFTER, "max_new_tokens": 4}
    done = [
        kvjax.generate(tiny, PROMPTS[:1], budget=budget, **options)[0]
        for budget in (24, (24, 24))
    ]
    assert done[0].tokens == done[1].tokens
    config = cache.make_spec(tiny.spec, policies.key_diff(), 24, AFTER)
    assert (config.budget, config.budget_rule.name) == ((24, 24), "uniform")
    rule = budgets.make("explicit", sizes=[16, [24, 40]])  # as a config has them
    assert rule is budgets.explicit((16, (24, 40)))
    assert budgets.allocated(rule, tiny.spec, 24) == (16, (24, 40))


def test_measured_is_the_mean_over_real_tokens(four):
    """Against the residual stream of the plain model, one prompt at a time."""
    rule = toys.loudest_layers()
    config = cache.make_spec(
        four.spec, policies.key_diff(), 24, AFTER, budget_rule=rule
    )
    tokens = np.zeros((3, 80), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt) for prompt in PROMPTS], jnp.int32)
    state = cache.init(four.spec, config, 3, config.prefill_capacity(four.spec, 80, 4))
    how = {"spec": four.spec, "config": config}
    state, _ = steps.prefill(four.params, state, jnp.asarray(tokens), lengths, **how)
    for row, prompt in enumerate(PROMPTS):
        found = streams(four, prompt)
        expected = [float(jnp.sum(rule.measure(*pair))) for pair in found]
        np.testing.assert_allclose(state.measured[row], expected, rtol=1e-4)


def streams(model, prompt):
    """Every layer's residual stream before and after attention, read at once."""
    full = cache.make_spec(model.spec, None, None)
    size = len(prompt)
    state = cache.init(model.spec, full, 1, (size,) * model.spec.num_layers)
    n, seen = jnp.asarray([size], jnp.int32), []

    def attend(index, *given):
        return cache.step_layer(index, *given, config=full, n=n, is_prefill=True)

    def measure(index, before, after, state):
        seen.append((before, after))
        return state

    tokens = jnp.asarray([prompt], jnp.int32)
    decoder.forward(
        model.params,
        model.spec,
        tokens,
        cache.next_positions(state, size),
        state,
        attend,
        measure,
    )
    return seen


def test_sizes_follow_what_was_measured(four):
    """Layers end with the rule's sizes, as if these had been given at first."""
    rule = toys.loudest_layers()
    job = job_of(four, rule)
    result = run_batch(four.params, job, PROMPTS, range(3))
    means = [
        [float(jnp.mean(rule.measure(*pair))) for pair in streams(four, prompt)]
        for prompt in PROMPTS
    ]
    sizes = budgets.reallocated(rule, np.mean(means, axis=0), 24)
    assert sorted(set(sizes)) == [12, 36] and sum(sizes) == 4 * 24
    new = job.max_new_tokens
    assert cache.capacities(result.state) == tuple(size + new for size in sizes)
    alike = dataclasses.replace(
        job, config=cache.make_spec(four.spec, policies.key_diff(), sizes, AFTER)
    )
    given = run_batch(four.params, alike, PROMPTS, range(3))
    assert given.tokens == result.tokens
    for a, b in zip(
        cache.kept_positions(given.state),
        cache.kept_positions(result.state),
        strict=True,
    ):
        for mine, theirs in zip(a, b, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_programs_are_shared(four):
    """A second batch that comes to the same sizes compiles nothing."""
    job = job_of(four, toys.loudest_layers())
    run_batch(four.params, job, PROMPTS, range(3))
    known = list(compiled._kept)
    run_batch(four.params, job, PROMPTS[::-1], range(3))
    assert set(compiled._kept) == set(known)


def job_of(model, rule):
    config = cache.make_spec(
        model.spec, policies.key_diff(), 24, AFTER, budget_rule=rule
    )
    return Job(model.spec, config, 3, bucket(model.spec, config, 80, 6), 6)


def sizes_rule(*sizes):
    return budgets.BudgetRule("mine", lambda spec, mean: sizes)


@pytest.mark.parametrize(
    ("budget", "rule", "schedule", "words"),
    [
        (24, sizes_rule(20, 20), AFTER, r"'mine' gives \(20, 20\).*2 = 48"),
        (24, sizes_rule(20.5, 27.5), AFTER, r"'mine' gives .*whole numbers"),
        (24, sizes_rule(24), AFTER, r"1 budgets for 2 layers from the rule 'mine'"),
        (24, "sqeeze", AFTER, r"budget rule 'sqeeze' is unknown"),
        (24, "math:floor", AFTER, r"budget rule 'math:floor'"),
        ((16, 32), "uniform", AFTER, r"says every layer's size already"),
        (
            128,
            toys.loudest_layers(),
            Schedule(),
            r"'loudest_layers' changes sizes once",
        ),
        (
            24,
            toys.loudest_layers()._replace(reallocate=None),
            AFTER,
            r"one of measure and reallocate",
        ),
    ],
)
def test_refused(budget, rule, schedule, words):
    with pytest.raises(UserError, match=words):
        cache.make_spec(
            tiny_spec(), policies.recency(), budget, schedule, budget_rule=rule
        )
