"""SqueezeAttention against its Algorithm 1 written anew, and through whole runs."""

import functools
import itertools
import time

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_model, tiny_spec

import kvjax
from kvjax import Schedule, UserError, cache, policies
from kvjax.cache import budgets
from kvjax.cache.budgets import squeeze_attention
from kvjax.cache.calibrations import Calibration
from kvjax.engine import runner
from kvjax.engine.jobs import Job, bucket

AFTER = Schedule("after_prefill", prefill_chunk=8)


# --- Algorithm 1 in NumPy -------------------------------------------------------------


def oracle_means(before, after, lengths):
    """Mean cosines [L] of streams [L, B, T, M]: over real tokens, then over rows."""
    found = np.zeros(before.shape[0])
    for layer in range(before.shape[0]):
        rows = []
        for row, n in enumerate(lengths):
            each = [
                a @ b / np.sqrt((a @ a) * (b @ b))
                for a, b in zip(
                    before[layer, row, :n], after[layer, row, :n], strict=True
                )
            ]
            rows.append(sum(each) / n)
        found[layer] = sum(rows) / len(rows)
    return found


def oracle_groups(values, count):
    """The best of all ways to put values into `count` groups, low means first."""
    best, least = None, np.inf
    for given in itertools.product(range(count), repeat=len(values)):
        if len(set(given)) < count:
            continue
        parts = [values[np.array(given) == g] for g in range(count)]
        means = [part.mean() for part in parts]
        cost = sum(
            ((part - mean) ** 2).sum() for part, mean in zip(parts, means, strict=True)
        )
        if means == sorted(means) and cost < least - 1e-12:
            best, least = np.array(given), cost
    return best


def streams(rng, layers=5, rows=3, tokens=7, width=12):
    before = rng.standard_normal((layers, rows, tokens, width))
    change = rng.uniform(0.1, 2.0, (layers, 1, 1, 1))
    return before, before + change * rng.standard_normal(before.shape)


@pytest.mark.parametrize("seed", range(4))
def test_against_algorithm_1(seed):
    """From hidden states of a ragged batch to sizes."""
    rng = np.random.default_rng(seed)
    before, after = streams(rng)
    lengths = rng.integers(2, 8, 3)
    expected = oracle_means(before, after, lengths)
    rule = budgets.make("squeeze", p=0.3)
    given = [jnp.asarray(x, jnp.float32) for x in (before, after)]
    cosines = np.stack([rule.measure(*pair) for pair in zip(*given, strict=True)])
    real = np.arange(7) < lengths[:, None]
    means = (cosines * real).sum(-1) / lengths
    np.testing.assert_allclose(means.mean(-1), expected, rtol=1e-5)
    groups = squeeze_attention.group(expected)
    np.testing.assert_array_equal(groups, oracle_groups(expected, 3))
    lent, mean = int((groups == 2).sum()), 100
    each = (5 * mean - lent * 30) / (5 - lent)
    found = np.array(rule.reallocate(expected, mean))
    assert found.sum() == 5 * mean and set(found[groups == 2]) == {30}
    assert np.abs(found[groups < 2] - each).max() < 1


def test_padding_is_not_measured():
    """A row of another's length has the mean of its own tokens, NaN beyond them."""
    config = cache.make_spec(tiny_spec(), "key_diff", 24, AFTER, budget_rule="squeeze")
    state = cache.init(tiny_spec(), config, 2, (24, 24))
    rng = np.random.default_rng(5)
    before, after = streams(rng, layers=2, rows=2)
    after[:, 1, 3:] = np.nan
    for index, pair in enumerate(zip(before, after, strict=True)):
        pair = [jnp.asarray(x, jnp.float32) for x in pair]
        n = jnp.asarray([7, 3], jnp.int32)
        state = cache.measure(index, *pair, state, config=config, n=n)
    means = np.asarray(state.measured).T / [7, 3]
    wanted = oracle_means(before, after, [7, 3])
    np.testing.assert_allclose(means.mean(1), wanted, rtol=1e-5)


# --- groups and sizes -----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_groups_are_the_best_there_are(seed):
    rng = np.random.default_rng(seed)
    values = rng.choice(np.linspace(0.2, 0.99, 9), 6)  # with ties
    count = min(3, len(set(values)))
    found = squeeze_attention.group(values)
    assert set(found) == set(range(count))
    wanted = oracle_groups(values, count)
    cost = lambda groups: sum(
        np.var(values[groups == g]) * (groups == g).sum() for g in range(count)
    )
    assert cost(found) == pytest.approx(cost(wanted), abs=1e-12)
    for a, b in itertools.combinations(range(6), 2):
        assert (found[a] <= found[b]) or values[a] > values[b]
        assert (found[a] == found[b]) or values[a] != values[b]


@pytest.mark.parametrize("p", [0.01, 0.3, 0.35, 0.77, 1.0])
def test_totals_are_kept_exactly(p):
    rng, rule = np.random.default_rng(1), budgets.squeeze(p)
    for _ in range(30):
        layers, mean = int(rng.integers(1, 33)), int(rng.integers(1, 3000))
        measured = rng.beta(8, 2, layers)
        sizes = budgets.reallocated(rule, measured, mean)  # raises unless they add up
        assert min(sizes) >= 1 and len(set(sizes)) <= 3
        more = sorted(set(sizes))[1:]
        assert not more or more[-1] - more[0] <= 1
        order = rng.permutation(layers)
        again = np.array(rule.reallocate(measured[order], mean))
        moved = np.array(sizes)[order]
        np.testing.assert_array_equal(again == again.min(), moved == moved.min())
        assert sorted(again) == sorted(moved)


def test_the_appendix_example():
    """Mistral-7B: 32 layers at 1,000 pairs and p = 0.3 come to 300 and 1,544."""
    assert (32 * 1000 - 14 * 300) // (32 - 14) == 1544
    measured = np.array([0.4, 0.45] + [0.8, 0.82] * 8 + [0.97, 0.98] * 7)
    sizes = budgets.reallocated(budgets.squeeze(0.3), measured, 1000)
    assert sizes == (1545,) * 8 + (1544,) * 10 + (300,) * 14


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([0.9], (100,)),
        ([0.9] * 4, (100,) * 4),
        ([0.9, 0.5], (35, 165)),
        ([0.5, 0.9, 0.9, 0.5], (165, 35, 35, 165)),
        ([0.9, 0.1, 0.5], (35, 133, 132)),
    ],
)
def test_few_different_layers(measured, expected):
    assert budgets.squeeze().reallocate(np.array(measured), 100) == expected


def test_sizes_are_those_of_the_last_group_alone():
    """Which of the other layers changes most makes no other program."""
    rule = budgets.squeeze()
    one = rule.reallocate(np.array([0.1, 0.5, 0.6, 0.9, 0.91]), 10)
    two = rule.reallocate(np.array([0.6, 0.1, 0.5, 0.9, 0.91]), 10)
    assert one == two == (14, 14, 14, 4, 4)


def test_least_is_a_floor():
    measured = np.array([0.1, 0.5, 0.9])
    assert budgets.squeeze(0.3, least=8).reallocate(measured, 10) == (11, 11, 8)
    assert budgets.squeeze(0.01).reallocate(measured, 10) == (15, 14, 1)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1000, (35, 133, 132)),
        (133, (35, 133, 132)),
        (132, (36, 132, 132)),
        (120, (60, 120, 120)),
        (101, (98, 101, 101)),
        (80, (100, 100, 100)),  # all keep everything, whatever they are given
    ],
)
def test_no_layer_gets_more_than_the_prompt_has(length, expected):
    rule = budgets.squeeze(capped=True, length=length)
    assert rule.reallocate(np.array([0.9, 0.1, 0.5]), 100) == expected


@pytest.mark.parametrize("seed", range(20))
def test_what_a_cap_leaves_over_goes_to_those_that_lend(seed):
    """Pair by pair: whoever has least of the last group gets the next one."""
    rng = np.random.default_rng(seed)
    groups, mean = rng.integers(0, 3, 12), int(rng.integers(10, 100))
    length, small = mean + int(rng.integers(0, 40)), max(1, mean // 3)
    wanted = list(squeeze_attention.sizes(groups, mean, small))
    lenders = [i for i, g in enumerate(groups) if g == max(groups)]
    while max(wanted) > length:
        wanted[wanted.index(max(wanted))] -= 1
        wanted[min(lenders, key=lambda i: wanted[i])] += 1
    found = squeeze_attention.sizes(groups, mean, small, length)
    assert found == tuple(wanted) and sum(found) == 12 * mean


def test_a_cap_is_the_prompts_that_a_config_is_told_of(tmp_path):
    """Of the length that `make_spec` knows, whosever cosines they are."""
    given = calibrated(tmp_path) | {"p": 0.3, "capped": True}
    make = functools.partial(cache.make_spec, tiny_spec(), "h2o", 40)
    rule = budgets.make("squeeze", **given)
    assert make(budget_rule=rule, length=60).budget == (60, 20)
    assert make(budget_rule=rule, length=200).budget == (68, 12)
    own = make(AFTER, budget_rule=budgets.squeeze(0.3, capped=True), length=60)
    assert own.budget_rule.reallocate(np.array([0.5, 0.75]), 40) == (60, 20)
    with pytest.raises(UserError, match="'squeeze' depends on the length of prompts"):
        make(budget_rule=rule)


def test_one_rule_for_the_same_options():
    """Rules are static arguments: another object would be another program."""
    assert budgets.squeeze(0.35) is budgets.make("squeeze", p=np.float64(0.35))
    assert budgets.pyramid(20) is budgets.make("pyramid")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"p": 0}, "squeeze.p=0.: give the share .* above 0 and 1 at most"),
        ({"p": -0.2}, "squeeze.p=-0.2."),
        ({"p": 1.5}, "squeeze.p=1.5."),
        ({"p": "0.3"}, "squeeze.p. is '0.3': give a number"),
        ({"p": float("nan")}, "is nan: give a number"),
        ({"least": 0}, "squeeze.least. 0: must be at least 1"),
        ({"source": "texts"}, "squeeze.source='texts'.: use one of .*calibration"),
        ({"path": "a.json"}, "squeeze.path='a.json'. goes with source='calibration'"),
        ({"path": 3, "source": "calibration"}, "squeeze.path. is 3: give a calib"),
        ({"capped": "yes"}, "squeeze.capped='yes'.: give True or False"),
        ({"length": 100}, "squeeze.length=100. goes with capped=True"),
        ({"length": 0, "capped": True}, "squeeze.length. 0: must be at least 1"),
        ({"share": 0.3}, "budget rule 'squeeze': .*share"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(UserError, match=words) as caught:
        budgets.make("squeeze", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "rule", "schedule", "words"),
    [
        ("h2o", "squeeze", Schedule(), "'squeeze' changes sizes once the prompt is in"),
        (
            "h2o",
            "squeeze",
            Schedule("prefill_only"),
            "'prefill_only' no longer has all",
        ),
        ("h2o", budgets.squeeze(least=25), AFTER, "'squeeze' keeps at least 25 pairs"),
        (policies.streaming(8), "squeeze", AFTER, "pins 8 pairs, but .* budget 8"),
        (
            "h2o",
            "squeeze",
            Schedule("decode_only", evict_size=8),
            "budget 8 must be larger than the 8 pairs",
        ),
    ],
)
def test_refused_before_a_prompt_is_read(policy, rule, schedule, words):
    with pytest.raises(UserError, match=words):
        cache.make_spec(tiny_spec(), policy, 24, schedule, budget_rule=rule)


# --- from a calibration ---------------------------------------------------------------


def calibrated(folder, similarity=(0.5, 0.75), model="tiny", layers=2):
    """The path of a calibration with these cosines."""
    path, shares = folder / "calibration.json", (((0.5, 0.5),) * layers,)
    told = {"target": "repetition", "num_texts": 1, "tokens": 96, "accuracy": 1.0}
    Calibration(
        model, "0", **told, ratios=(0.5,), shares=shares, similarity=similarity
    ).save(path)
    return {"source": "calibration", "path": str(path)}


def test_a_calibration_s_sizes_are_those_of_its_cosines(tmp_path):
    """Known before a prompt is read, so that eviction may begin while it is."""
    rule = budgets.make("squeeze", p=0.3, **calibrated(tmp_path))
    schedule = Schedule(prefill_chunk=4, evict_size=4)
    config = cache.make_spec(tiny_spec(), "h2o", 40, schedule, budget_rule=rule)
    assert (
        config.budget
        == (68, 12)
        == budgets.squeeze(0.3).reallocate(np.array([0.5, 0.75]), 40)
    )
    assert not rule.reallocate and budgets.possible(rule, config.budget) == {12, 68}


def test_the_package_s_calibration_has_cosines():
    """Of SmolLM2's 30 layers all but three lend, see docs/results/squeeze.md."""
    shape = {"num_layers": 30, "num_kv_heads": 3, "num_heads": 9}
    spec = tiny_spec(name="smollm2-135m-instruct", **shape)
    rule = budgets.squeeze(0.35, least=40, source="calibration")
    sizes = budgets.allocated(rule, spec, 250)
    large = [layer for layer, size in enumerate(sizes) if size > 250]
    assert large == [0, 1, 24] and sizes.count(88) == 27 and sum(sizes) == 7500


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"similarity": ()}, "calibration of 'tiny' has no similarity of layers"),
        ({"model": "huge"}, "a calibration of 'huge' .* does not fit 'tiny'"),
        ({"layers": 3, "similarity": (0.1,) * 3}, "3 layers .* does not fit"),
    ],
)
def test_another_calibration(tmp_path, changes, words):
    rule = budgets.squeeze(**calibrated(tmp_path, **changes))
    with pytest.raises(UserError, match=words):
        budgets.allocated(rule, tiny_spec(), 24)


# --- whole runs -----------------------------------------------------------------------


RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 50, n).tolist() for n in (61, 50, 80)]
POLICIES = ("h2o", policies.sliding_window(96), "streaming")


@pytest.mark.parametrize(
    "policy", often(POLICIES, ["h2o"], "e2e"), ids=lambda p: getattr(p, "name", p)
)
def test_what_is_kept_is_the_sizes(tiny, policy):
    new = 3
    done = kvjax.generate(
        tiny,
        PROMPTS,
        policy=policy,
        budget=24,
        budget_rule="squeeze",
        schedule=AFTER,
        max_new_tokens=new,
        ignore_eos=True,
    )
    for each in done:
        kept = [[len(head) for head in layer] for layer in each.kept_positions]
        sizes = {8 + new - 1, 40 + new - 1}  # the last new token is not read
        assert {size for layer in kept for size in layer} == sizes
        assert all(len(set(layer)) == 1 for layer in kept)


@pytest.mark.parametrize(("capped", "sizes"), [(False, {20, 100}), (True, {40, 80})])
def test_a_cap_leaves_no_slot_empty(tiny, capped, sizes):
    """Of 80 tokens one layer holds all; what it cannot hold the other one keeps."""
    (each,) = kvjax.generate(
        tiny,
        PROMPTS[2:],
        policy="h2o",
        budget=60,
        budget_rule=budgets.squeeze(1 / 3, capped=capped),
        schedule=AFTER,
        max_new_tokens=3,
        ignore_eos=True,
    )
    kept = {len(head) - 2 for layer in each.kept_positions for head in layer}
    assert kept == {min(size, 80) for size in sizes}


def test_decode_only_never_holds_more(tiny):
    """A rule's sizes are what decoding holds at most, layer by layer."""
    config = cache.make_spec(
        tiny.spec,
        "streaming",
        24,
        Schedule("decode_only", prefill_chunk=8, evict_size=2),
        budget_rule="squeeze",
    )
    job = Job(tiny.spec, config, 3, bucket(tiny.spec, config, 80, 9), 9)
    whole, start = runner.Whole(tiny.params, job), time.perf_counter()
    result = runner.run_batch(whole, PROMPTS, range(3))
    told = result.prefill_seconds + result.decode_seconds
    assert 0 < whole.compile_seconds < time.perf_counter() - start - told
    sizes = whole.job.config.budget
    assert sorted(sizes) == [8, 40]
    assert cache.capacities(result.state) == sizes
    for row, prompt in enumerate(PROMPTS):
        for size, layer in zip(
            sizes, cache.kept_positions(result.state)[row], strict=True
        ):
            for head in layer:
                assert size - 2 < len(head) <= size < len(prompt)
                assert list(head[:4]) == [0, 1, 2, 3]


@pytest.mark.e2e
def test_staggered_prefill(tiny):
    """The first group decides for the pool; tokens are those of its sizes."""
    config = cache.make_spec(tiny.spec, "h2o", 24, AFTER, budget_rule="squeeze")
    room = bucket(tiny.spec, config, 80, 6)
    job = Job(tiny.spec, config, 3, room, 6, prefill_batch=2)
    whole = runner.Whole(tiny.params, job)
    result = runner.run_batch(whole, PROMPTS, range(3))
    sizes = whole.job.config.budget
    assert sorted(sizes) == [8, 40]
    assert cache.capacities(result.state) == tuple(size + 6 for size in sizes)
    given = cache.make_spec(tiny.spec, "h2o", sizes, AFTER)
    same = runner.Whole(tiny.params, Job(tiny.spec, given, 3, room, 6))
    assert runner.run_batch(same, PROMPTS, range(3)).tokens == result.tokens


@pytest.mark.e2e
def test_all_of_the_mean_is_uniform(tiny):
    options = {"policy": "h2o", "budget": 24, "schedule": AFTER, "max_new_tokens": 5}
    one, two = (
        kvjax.generate(tiny, PROMPTS, budget_rule=rule, **options)
        for rule in (budgets.squeeze(1.0), None)
    )
    assert [each.tokens for each in one] == [each.tokens for each in two]


# --- pyramid --------------------------------------------------------------------------


def shape(layers):
    return tiny_spec(num_layers=layers)


@pytest.mark.parametrize(
    ("options", "layers", "mean", "expected"),
    [
        ({}, 3, 100, (195, 100, 5)),  # 100 / 20, and 2 x 100 less that
        ({"beta": 4}, 4, 16, (28, 20, 12, 4)),
        ({"beta": 1}, 4, 16, (16,) * 4),
        ({"beta": 4, "window": 8}, 3, 24, (36, 24, 12)),  # 8 + 16 / 4
        ({"least": 8}, 3, 24, (40, 24, 8)),
        ({"beta": 3}, 3, 10, (17, 10, 3)),  # 16.67, 10, 3.33
        ({}, 1, 7, (7,)),
    ],
)
def test_pyramid_by_hand(options, layers, mean, expected):
    rule = budgets.make("pyramid", **options)
    assert budgets.allocated(rule, shape(layers), mean) == expected


def test_pyramid_s_totals():
    rng = np.random.default_rng(3)
    for _ in range(50):
        layers, mean = int(rng.integers(1, 81)), int(rng.integers(8, 3000))
        least = int(rng.integers(1, 9))
        beta, window = float(rng.uniform(1, 50)), int(rng.integers(0, 9))
        rule = budgets.pyramid(beta, window, least)
        sizes = budgets.allocated(rule, shape(layers), mean)  # raises unless they add
        assert list(sizes) == sorted(sizes, reverse=True)
        assert max(least, window) <= sizes[-1]
        if layers > 1:
            last = max(window + (mean - window) / beta, least)
            line = np.linspace(2 * mean - last, last, layers)
            assert np.abs(np.array(sizes) - line).max() < 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 0.5}, "pyramid.beta. 0.5: must be at least 1"),
        ({"beta": "20"}, "pyramid.beta. is '20'"),
        ({"window": -1}, "pyramid.window. -1"),
        ({"least": 30}, "'pyramid' keeps at least 30 pairs .* the budget 24"),
        ({"window": 25}, "'pyramid' keeps at least 25 pairs"),
    ],
)
def test_bad_pyramids(options, words):
    with pytest.raises(UserError, match=words):
        rule = budgets.make("pyramid", **options)
        cache.make_spec(tiny_spec(), "h2o", 24, AFTER, budget_rule=rule)


@pytest.mark.e2e
def test_a_pyramid_runs():
    rule = budgets.pyramid(beta=2)
    done = kvjax.generate(
        tiny_model(num_layers=4),
        PROMPTS[2:],
        policy="h2o",
        budget=24,
        budget_rule=rule,
        schedule=AFTER,
        max_new_tokens=1,
    )
    assert [len(layer[0]) for layer in done[0].kept_positions] == [36, 28, 20, 12]
