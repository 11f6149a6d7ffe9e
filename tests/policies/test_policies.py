"""The policies, run on arrays without a model or a cache."""

import functools
import inspect
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies
from kvjax.policies.base import check_params
from kvjax.types import Observation, Stats, UserError, View

jit = functools.partial(  # small arrays: compiling takes longer than running
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def view(pos, keep, keys=None):
    pos = jnp.asarray(pos, jnp.int32)
    now = jnp.max(pos, axis=(1, 2))
    return View(pos, now, jnp.asarray(keep, jnp.int32), lambda: keys, lambda: keys)


def given_scores(name="given"):
    """A rule whose scores are its statistics of the slots."""
    return policies.Policy(
        init=lambda *shape: Stats(policies.zeros_per_slot(*shape)),
        observe=lambda stats, view, observation: stats,
        score=lambda stats, view: stats.per_slot,
        required_stats=frozenset(),
        name=name,
    )


GIVEN = given_scores()
ROW = jnp.asarray([[[1, 2, np.nan, 4, 5, 6], [6, 5, 4, 3, 2, 1]]], jnp.float32)
EMBRACING = {
    "mix": (policies.mix(GIVEN, policies.recency()), Stats((ROW, ()), ((), ()))),
    "mix, other": (policies.mix(policies.recency(), GIVEN), Stats(((), ROW), ((), ()))),
    "smooth": (policies.smooth(GIVEN, 3), Stats(ROW)),
    "chunked": (policies.chunked(GIVEN, 2), Stats(ROW)),
    "shared_heads": (policies.shared_heads(GIVEN), Stats(ROW)),
    "per_head": (policies.per_head(GIVEN), Stats(ROW)),
    "criticalkv": (policies.criticalkv(GIVEN), Stats((ROW, jnp.ones_like(ROW)))),
    "roco": (policies.roco(recent=0), Stats((ROW, ROW))),
}


@pytest.mark.parametrize("name", EMBRACING)
def test_nan_is_not_swallowed(name):
    """So that whoever runs the rule can tell of it."""
    policy, stats = EMBRACING[name]
    pos = np.broadcast_to(np.arange(6), (1, 2, 6))
    score = np.asarray(policy.score(stats, view(pos, [[4, 4]])))
    assert np.isnan(score[0, 0, 2]) and not np.isnan(score[0, 1, [0, 1, 3, 4]]).any()


def test_pinned_pairs_are_all_counted():
    """As many as `score` may pin, or what the budget was checked for falls short."""
    pins = policies.protect(policies.key_norm(), 4, 16)
    pos = np.arange(40)[None, None]
    keys = jnp.ones((1, 1, 40, 2))
    for policy in (
        policies.chunked(pins, 10),  # 0 to 9, and 20 to 39 with its window's 24 to 39
        policies.mix(
            policies.streaming(4), policies.protect(policies.recency(), 0, 16)
        ),
    ):
        stats = policy.init(types.SimpleNamespace(num_kv_heads=1), 1, 40)
        score = policy.score(stats, view(pos, [[30]], keys))
        assert np.isposinf(score).sum() <= policy.num_pinned
    assert policies.chunked(pins, 10).num_pinned == 20 + 18
    assert policies.chunked(policies.key_norm(), 10).num_pinned == 0
    assert policies.mix(pins, policies.snapkv(8)).num_pinned == 28
    assert policies.by_size(pins, policies.snapkv(8)).num_pinned == 20
    assert policies.per_head(pins, total=0.3).num_pinned == 67


def test_roco_pins_nothing_where_little_goes():
    """12 pairs of which 1 goes: the 10 newest may be more than the spread protects."""
    policy = policies.roco(recent=10)
    ones = jnp.ones((1, 1, 12))
    score = policy.score(Stats((ones, ones)), view(np.arange(12)[None, None], [[11]]))
    assert not np.isposinf(score[0, 0, 2]) and policy.num_pinned == 0


def test_per_head_leaves_its_share_of_a_row():
    """Also where a head is full and another, within its room, holds more than n."""
    policy = policies.per_head(GIVEN, total=0.5, floor=0.0)
    pos = np.broadcast_to(np.arange(8), (1, 3, 8)).copy()
    pos[0, 1, 7:], pos[0, 2, 3:] = -1, -1
    held = (pos >= 0).sum(-1)  # 8, 7, 3
    score = np.random.default_rng(0).normal(size=pos.shape)
    score = jnp.asarray(score + np.asarray([[[0], [9], [0]]]))
    left = policy.score(Stats(score), view(pos, held - [[4, 0, 0]]))
    stay = (np.isfinite(left) & (pos >= 0)).sum(-1)
    assert stay.sum() == 3 * 2 and stay.max() == 4  # of n = 4
    calm = policy.score(Stats(score), view(pos, held))
    np.testing.assert_array_equal(calm, score)


def test_a_rule_in_somebody_elses_code():
    """No model, cache or layout of ours: arrays in, arrays out, under jit."""
    policy = policies.average_attention()
    spec = types.SimpleNamespace(num_kv_heads=2, queries_per_kv_head=1, head_dim=4)
    weights = jax.nn.softmax(jax.random.normal(jax.random.key(0), (1, 2, 6, 6)))
    causal = weights * jnp.tril(jnp.ones((6, 6)))[None, None]

    @jax.jit
    def choose(weights):
        pos = jnp.broadcast_to(jnp.arange(6), (1, 2, 6))
        seen = view(pos, [[4, 4]])
        stats = policy.init(spec, 1, 6)
        stats = policy.observe(stats, seen, Observation(attn_sum=weights.sum(2)))
        return policies.select_evictions(
            policy.score(stats, seen), pos, jnp.asarray([2])
        )

    average = np.asarray(causal.sum(2)) / (6 - np.arange(6))
    expected = np.zeros((1, 2, 6), bool)
    for h in range(2):
        expected[0, h, np.argsort(average[0, h])[:2]] = True
    np.testing.assert_array_equal(choose(causal), expected)


@pytest.mark.parametrize(
    ("recent", "left", "pinned"),
    [
        (0.5, [0, 1, 2, 7, 8, 9], 0),
        (2, [0, 1, 2, 3, 8, 9], 2),
        (4, [0, 1, 6, 7, 8, 9], 4),
        (1, [4, 5, 6, 7, 8, 9], 0),
        (1.0, [4, 5, 6, 7, 8, 9], 0),
        (0, [0, 1, 2, 3, 4, 5], 0),
    ],
)
def test_h2o_splits_what_is_kept(recent, left, pinned):
    """By a share, or by a count, which budgets are checked against."""
    pos = np.arange(10)[None, None]
    mass = jnp.asarray(np.arange(10, 0, -1)[None, None], jnp.float32)
    policy = policies.make("h2o", recent=recent)
    gone = policies.select_evictions(
        policy.score(Stats(mass), view(pos, [[6]])), jnp.asarray(pos), jnp.asarray([4])
    )
    assert np.flatnonzero(~gone[0, 0]).tolist() == left
    assert policy.num_pinned == pinned


def test_key_diff_drops_the_alike():
    keys = jnp.asarray([[[[1, 0.1], [1, 0], [1, -0.1], [0, 1]]]], jnp.float32)
    pos = jnp.arange(4)[None, None]
    score = policies.key_diff().score((), view(pos, [2], keys))
    assert int(jnp.argmax(score)) == 3
    empty = view(jnp.asarray([[[0, -1, 2, 3]]]), [2], keys.at[:, :, 1].set(1e9))
    assert np.isfinite(policies.key_diff().score((), empty)).all()


def test_random_is_a_uniform_sample():
    """Half of 4,000 positions stay, evenly spread, differing by head and seed."""
    pos = np.broadcast_to(np.arange(4000), (1, 2, 4000))
    kept = [
        np.argsort(policies.random(seed).score((), view(pos, [2000])))[..., 2000:]
        for seed in (0, 1)
    ]
    for sample in (kept[0][0, 0], kept[0][0, 1], kept[1][0, 0]):
        assert np.all(np.abs(np.histogram(sample, 8, (0, 4000))[0] - 250) < 60)
    overlap = len(np.intersect1d(kept[0][0, 0], kept[0][0, 1]))
    assert 900 < overlap < 1100
    assert 900 < len(np.intersect1d(kept[0][0, 0], kept[1][0, 0])) < 1100


def test_streaming_keeps_sinks_and_newest():
    pos = np.arange(12)[None, None]
    score = policies.streaming(sinks=2).score((), view(pos, [5]))
    gone = policies.select_evictions(score, jnp.asarray(pos), jnp.asarray([7]))
    assert np.flatnonzero(~gone[0, 0]).tolist() == [0, 1, 9, 10, 11]


def test_every_public_policy_is_registered_and_in_readme():
    """Under one name in Python, in configs and in README's table."""
    factories = {
        name
        for name in policies.__all__
        if inspect.isfunction(found := getattr(policies, name))
        and (signature := inspect.signature(found)).return_annotation is policies.Policy
        and all(
            each.default is not each.empty for each in signature.parameters.values()
        )
    }
    assert factories == set(policies.names())
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    table = readme.partition("| policy | source |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    in_table = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert in_table <= factories
    assert factories - in_table <= {"retrieval_heads"}  # below the table
    assert "`retrieval_heads`" in readme


def test_factories_give_one_policy():
    """So that jit, which takes them static, compiles once."""
    assert policies.h2o() is policies.h2o()
    assert policies.protect(policies.h2o(), 1, 2) is policies.protect(
        policies.h2o(), 1, 2
    )
    assert policies.criticalkv() is policies.criticalkv(policies.snapkv())
    assert [policies.make(name).name for name in policies.names()] == list(
        policies.names()
    )
    with pytest.raises(UserError):
        policies.make("")


# ------------------------------------------------------------------- heads split up


def noted(policy, queries, keys, heads, gather_heads=lambda x: x, first_head=0):
    """Scores [B, K, C] of C tokens that were read at once, by `heads` of the heads."""
    spec = types.SimpleNamespace(
        num_kv_heads=heads, queries_per_kv_head=3, head_dim=keys.shape[-1]
    )
    batch, _, count, _ = keys.shape
    positions = jnp.broadcast_to(jnp.arange(count), (batch, heads, count))
    seen = View(
        positions,
        jnp.full(batch, count - 1),
        jnp.full((batch, heads), 5),
        keys=lambda: keys,
        gather_heads=gather_heads,
        heads=first_head + jnp.arange(heads),
    )
    observation = Observation(
        jnp.full(batch, count),
        positions[:, 0],
        queries=queries,
        last_attn=jnp.sum(queries, axis=(2, 4)),
    )
    stats = policy.observe(policy.init(spec, batch, count), seen, observation)
    return policy.score(stats, seen)


LOOK_ACROSS = {
    "shared_heads": policies.shared_heads(policies.key_norm()),
    "per_head": policies.per_head(policies.key_norm(), total=0.7),
    "tova": policies.tova(),
    "simlayerkv": policies.simlayerkv(threshold=0.5, sinks=1, recent=3, queries=4),
    "mix": policies.mix(policies.tova(), policies.key_norm()),
    "random": policies.random(),  # asks for nothing but the numbers of its heads
}


@pytest.mark.parametrize("name", LOOK_ACROSS)
def test_heads_may_be_split(name):
    """Two halves that ask each other say what the whole says."""
    policy = LOOK_ACROSS[name]
    assert policy.needs_all_heads == (name != "random")
    rng = np.random.default_rng(0)
    queries = jnp.asarray(rng.normal(size=(3, 4, 3, 9, 8)), jnp.float32)
    keys = jnp.asarray(rng.normal(size=(3, 4, 9, 8)), jnp.float32)

    def half(queries, keys):
        gather = lambda x: jax.lax.all_gather(x, "heads", axis=1, tiled=True)
        first = jax.lax.axis_index("heads") * 2
        return noted(policy, queries, keys, 2, gather, first)

    split = [jnp.stack(jnp.split(x, 2, axis=1)) for x in (queries, keys)]
    both = jit(jax.vmap(half, axis_name="heads"))(*split)
    whole = jit(lambda *pairs: noted(policy, *pairs, 4))(queries, keys)
    np.testing.assert_array_equal(jnp.concatenate(list(both), axis=1), whole)


def test_rules_made_of_rules_say_who_looks_across():
    for build in (policies.protect, policies.smooth, policies.criticalkv):
        assert build(policies.tova()).needs_all_heads
        assert not build(policies.h2o()).needs_all_heads


# ------------------------------------------------------------------- a learned rule


def told(stats, view, observation):
    """Every pair's score, from what attention read when the pair came."""
    new = jnp.einsum("btm,mk->bkt", observation.hidden, view.params)
    new = policies.own_heads(view, new)
    return Stats(policies.scatter_new(view, observation, new, stats.per_slot))


LINEAR = policies.Policy(
    init=lambda *shape: Stats(policies.zeros_per_slot(*shape)),
    observe=told,
    score=lambda stats, view: stats.per_slot,
    required_stats=frozenset({"hidden"}),
    name="linear",
)
LAYERS, ROWS, HEADS, COUNT, WIDTH, BLOCK, BUDGET = 2, 3, 2, 24, 5, 8, 7
LENGTHS = (24, 13, 6)
programs = []  # one entry for each time that `choose` is traced


@functools.partial(jit, static_argnames=("policy", "heads"))
def choose(policy, layers, hidden, heads=HEADS, first_head=0):
    """bool[L, B, K, C], the positions kept of rows that are read block by block."""
    programs.append(policy)
    spec = types.SimpleNamespace(num_kv_heads=heads)
    lengths = jnp.asarray(LENGTHS)

    def layer(index):
        # Pairs lie in slots from the last to the first.
        place = jnp.broadcast_to(jnp.arange(COUNT)[::-1], (ROWS, heads, COUNT))
        kept = jnp.zeros(place.shape, bool)
        stats = policy.init(spec, ROWS, COUNT)
        for start in range(0, COUNT, BLOCK):
            n = jnp.clip(lengths - start, 0, BLOCK)
            end = (start + n)[:, None, None]
            kept = kept | ((place >= start) & (place < end))
            live = jnp.sum(kept, axis=-1)
            positions = jnp.where(kept, place, -1)
            most = jnp.minimum(live, BUDGET)
            seen = View(
                positions,
                jnp.minimum(lengths, start + BLOCK) - 1,
                most,
                params=layers[index],
                heads=first_head + jnp.arange(heads),
            )
            at = jnp.broadcast_to(start + jnp.arange(BLOCK), (ROWS, BLOCK))
            here = hidden[index, :, start : start + BLOCK]
            stats = policy.observe(stats, seen, Observation(n, at, hidden=here))
            scores = policy.score(stats, seen)
            kept &= ~policies.select_evictions(scores, positions, live - most)
        return kept[..., ::-1]

    return jnp.stack([layer(index) for index in range(LAYERS)])


def by_hand(weights, hidden):
    """The same in NumPy: per head a list of positions, of which the worst go."""
    kept = np.zeros((LAYERS, ROWS, HEADS, COUNT), bool)
    for index, row, head in np.ndindex(LAYERS, ROWS, HEADS):
        score = hidden[index, row] @ weights[index][:, head]
        held = []
        for start in range(0, LENGTHS[row], BLOCK):
            held += range(start, min(start + BLOCK, LENGTHS[row]))
            held = sorted(held, key=lambda p: score[p])[-BUDGET:]
        kept[index, row, head, held] = True
    return kept


@pytest.fixture(scope="module")
def hidden():
    shape = (LAYERS, ROWS, COUNT, WIDTH)
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def weights(seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(WIDTH, HEADS)).astype(np.float32) for _ in range(LAYERS)]


def run(policy, hidden, **options):
    return np.asarray(choose(policy, policy.params.layers, hidden, **options))


def test_learned_rule(hidden):
    """Its weights are arguments of the program: others need no other program."""
    programs.clear()
    choices = []
    for seed in (0, 1):
        policy = policies.with_params(LINEAR, weights(seed))
        choices.append(run(policy, hidden))
        np.testing.assert_array_equal(choices[-1], by_hand(weights(seed), hidden))
    assert not np.array_equal(*choices)
    assert len(programs) == 1


def test_learned_rule_takes_its_own_heads(hidden):
    policy = policies.with_params(LINEAR, weights(0))
    part = run(policy, hidden, heads=1, first_head=1)
    np.testing.assert_array_equal(part, run(policy, hidden)[:, :, 1:])


def test_weights_differ_by_kind_alone():
    plain, same, wider, half = (
        policies.with_params(LINEAR, [np.ones((WIDTH, size), dtype)] * LAYERS)
        for size, dtype in ((2, "f4"), (2, "f4"), (3, "f4"), (2, "f2"))
    )
    other = policies.with_params(LINEAR, weights(0))
    assert plain == same == other and hash(plain) == hash(same) == hash(other)
    assert len({LINEAR, plain, wider, half}) == 4


@pytest.mark.parametrize(
    "build",
    [
        policies.protect,
        policies.smooth,
        policies.chunked,
        policies.shared_heads,
        policies.per_head,
        policies.criticalkv,
    ],
)
def test_weights_go_along(build):
    """Also those of a rule that only differs by its weights."""
    first, second = (policies.with_params(LINEAR, weights(seed)) for seed in (0, 1))
    made = build(first), build(second)
    assert [each.params for each in made] == [first.params, second.params]
    for each, policy in zip(made, (first, second), strict=True):
        assert each.params is policy.params
    assert made[0].score is made[1].score  # the same program
    assert build(LINEAR).params is None


def test_mix_hands_each_its_own_weights(hidden):
    first, second = (policies.with_params(LINEAR, weights(seed)) for seed in (0, 1))
    for share, policy in ((1.0, first), (0.0, second)):
        both = policies.mix(first, second, weight=share)
        np.testing.assert_array_equal(run(both, hidden), run(policy, hidden))
    beside = policies.mix(policies.recency(), second, weight=0.0)
    np.testing.assert_array_equal(run(beside, hidden), run(second, hidden))
    nested = policies.protect(policies.mix(beside, first, weight=0.0), 0, 0)
    np.testing.assert_array_equal(run(nested, hidden), run(first, hidden))


def test_numbers_of_layers_must_agree():
    policy = policies.with_params(LINEAR, weights(0))
    check_params(policy, LAYERS)
    check_params(policies.recency(), 30)
    with pytest.raises(UserError, match=r"'linear' has weights for 2 .* has 30"):
        check_params(policy, 30)
    short = policies.with_params(LINEAR, weights(0)[:1])
    with pytest.raises(UserError, match="weights for 1 and 2 layers"):
        policies.mix(policy, short)


def test_factories_take_arrays():
    """What cannot be compared is made anew, with its own weights."""

    @policies.memoized
    def scorer(layers):
        return policies.with_params(LINEAR, layers)

    for seed in (0, 1):
        found = scorer(weights(seed)).params.layers
        jax.tree.map(np.testing.assert_array_equal, found, tuple(weights(seed)))


def test_by_size_tells_heads_apart_by_their_budget():
    spec = types.SimpleNamespace(num_kv_heads=2, queries_per_kv_head=1, head_dim=4)
    large, small = policies.key_norm(), policies.recency()
    rule = policies.by_size(large, small, above=1.5)
    keys = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 5, 4)))
    spot = jnp.broadcast_to(jnp.arange(5), (1, 2, 5))
    seen = View(spot, jnp.asarray([5]), jnp.full((1, 2), 3), lambda: keys, lambda: keys)
    stats = rule.init(spec, 1, 5)
    for budget, mean, expected in (
        (16, 10.0, large),
        (15, 10.0, small),
        (10, None, large),
        (None, 10.0, large),
    ):
        view = seen._replace(budget=budget, mean_budget=mean)
        score = expected.score(expected.init(spec, 1, 5), view)
        np.testing.assert_array_equal(rule.score(stats, view), score)
    assert rule is policies.by_size(large, small, above=1.5)
    with pytest.raises(UserError, match=r"by_size\(above\)"):
        policies.by_size(large, small, above=-1)
