"""A rule's mistakes are told in one line, before anything is compiled."""

import time

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_spec
from testing import layer
from testing.rules import POLICIES

from kvjax import Schedule, UserError, cache, policies
from kvjax.cache.spec import make_spec
from kvjax.policies import checks
from kvjax.types import OBSERVABLE, Stats, View

SPEC = tiny_spec()  # K=2, G=3, D=8, M=24
SLOTS = 96


def zeros(*shape):
    return Stats(per_slot=policies.zeros_per_slot(*shape))


SUMS = policies.Policy(
    init=zeros,
    observe=lambda stats, view, seen: Stats(stats.per_slot + seen.attn_sum),
    score=lambda stats, view: stats.per_slot,
    required_stats=frozenset({"attn_sum"}),
    name="mine",
)


def learned(stats, view, seen):
    new = jnp.einsum("btm,mk->bkt", seen.hidden, view.params)
    return Stats(policies.scatter_new(view, seen, new, stats.per_slot))


LEARNED = SUMS._replace(observe=learned, required_stats=frozenset({"hidden"}))


def configured(policy, phases="prefill_and_decode"):
    return make_spec(SPEC, policy, SLOTS, Schedule(phases, prefill_chunk=8))


@pytest.mark.parametrize("name", POLICIES)
def test_rules_are_right(name):
    checks.check_policy(POLICIES[name], SPEC, SLOTS, in_decode=True)


def test_axes_of_all_that_can_be_observed_are_known():
    assert set(checks._AXES) == OBSERVABLE


def test_learned_rules_are_right():
    weights = [jnp.ones((SPEC.model_dim, SPEC.num_kv_heads))] * 2
    mine = policies.with_params(LEARNED, weights)
    configured(policies.protect(mine, 1, 1))
    configured(policies.mix(policies.tova(), mine))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"required_stats": frozenset()}, ["observe reads attn_sum", "required_stats"]),
        ({"required_stats": {"attn_sum"}}, ["frozenset"]),
        (
            {
                "observe": lambda stats, view, seen: Stats(seen.last_attn),
                "required_stats": frozenset(),
            },
            ["observe reads last_attn"],
        ),
        ({"init": lambda spec, rows, slots: ()}, ["init gives ()", "Stats"]),
        (
            {"init": lambda spec, rows, slots: Stats(jnp.zeros((rows, slots)))},
            ["per_slot float32[4,96]", "[B, K, C]"],
        ),
        (
            {"init": lambda spec, rows, slots: Stats((), jnp.zeros(slots))},
            ["per_row float32[96]", "lead with [B]"],
        ),
        (
            {"observe": lambda stats, view, seen: Stats((stats.per_slot,))},
            ["observe makes", "(float32[4,2,96],)"],
        ),
        (
            {"observe": lambda stats, view, seen: Stats(stats.per_slot[..., :1])},
            ["observe makes", "float32[4,2,1]", "float32[4,2,96]"],
        ),
        (
            {"observe": lambda stats, view, seen: Stats(stats.per_slot > 0)},
            ["observe makes", "bool[4,2,96]", "dtypes"],
        ),
        (
            {"score": lambda stats, view: jnp.sum(stats.per_slot, axis=1)},
            ["score gives float32[4,96]", "numbers [B, K, C]"],
        ),
        (
            {"score": lambda stats, view: jnp.swapaxes(stats.per_slot, 0, 1)},
            ["score gives float32[2,4,96]"],
        ),
        (
            {"score": lambda stats, view: view.positions > 7},
            ["score gives bool[4,2,96]"],
        ),
        ({"score": lambda stats, view: None}, ["score gives None"]),
        (
            {"score": lambda stats, view: stats.per_slot + view.keys()},
            ["score raises", "(4, 2, 96, 8)"],
        ),
        (
            {"score": lambda stats, view: view.gather_heads(stats.per_slot)},
            ["gather_heads", "needs_all_heads=True"],
        ),
        (
            {"observe": learned, "required_stats": frozenset({"hidden"})},
            ["view.params", "with_params"],
        ),
    ],
)
def test_mistakes_are_told(changes, words):
    with pytest.raises(UserError) as caught:
        configured(SUMS._replace(**changes))
    told = str(caught.value)
    assert "\n" not in told
    assert all(word in told for word in ("'mine'", *words)), told


def test_weights_of_a_wrong_shape_are_told():
    """In whichever layer they are."""
    right, wrong = (jnp.ones((size, SPEC.num_kv_heads)) for size in (24, 23))
    with pytest.raises(UserError, match=r"observe raises .*23"):
        configured(policies.with_params(LEARNED, [right, wrong]))


def test_a_factory_is_no_policy():
    with pytest.raises(UserError, match=r"policy is .h2o.*policies\.h2o\(\)"):
        configured(policies.h2o)


def test_what_never_observes_generated_tokens_need_not_be_able_to():
    def observe(stats, view, seen):
        if not seen.is_prefill:
            raise NotImplementedError("prompts only")
        return SUMS.observe(stats, view, seen)

    once = SUMS._replace(observe=observe)
    configured(once, "after_prefill")
    with pytest.raises(UserError, match="NotImplementedError: prompts only"):
        configured(once)


def test_a_rule_is_traced_once():
    traced = []

    def score(stats, view):
        traced.append(view)
        return stats.per_slot

    mine = SUMS._replace(score=score)
    for _ in range(3):
        configured(mine)
    assert len(traced) == 1


def test_rules_of_small_heads_are_traced_too():
    wrong = SUMS._replace(score=lambda stats, view: view.positions > 7)
    rule = policies.by_size(policies.recency(), wrong)
    with pytest.raises(UserError, match=r"score gives bool\[4,2,96\]"):
        configured(rule)
    configured(policies.by_size(policies.recency(), SUMS))


def test_checks_are_cheap():
    """Nothing is compiled or allocated: a long cache costs no more than a short one."""
    start = time.perf_counter()
    checks.check_policy(policies.r_kv(), SPEC, 10**6, in_decode=True)
    assert time.perf_counter() - start < 5  # r_kv's products of keys alone are 10**12


# ------------------------------------------------------------ scores that are no number

ROWS, PROMPT, NEW, BLOCK = 6, 24, 8, 8
LAYER = layer.spec_of(heads=2, group=1, depth=8)
DATA = layer.random_data(LAYER, ROWS, PROMPT + NEW, seed=0)
LENGTHS = (24, 24, 24, 24, 24, 3)  # the last never evicts


def driven(policy, phases):
    """The error raised after a prompt and some tokens, if any."""
    schedule = Schedule(phases, prefill_chunk=BLOCK, evict_size=BLOCK)
    config = make_spec(LAYER, policy, 16, schedule)
    layer.run(LAYER, config, DATA, LENGTHS, PROMPT)


def nan_at(where):
    """Newest stay; NaN where `where` says so of positions."""

    def score(view):
        newest = view.positions.astype(jnp.float32)
        return jnp.where(where(view.positions), jnp.nan, newest)

    return policies.stateless("nan", score)


@pytest.mark.parametrize(
    ("phases", "where"),
    [
        ("prefill_and_decode", lambda at: at == 5),
        ("prefill_and_decode", lambda at: at >= PROMPT - BLOCK),  # as it writes
        ("decode_only", lambda at: at == 5),
        ("after_prefill", lambda at: at == 5),
    ],
)
def test_nan_is_told(phases, where):
    with pytest.raises(RuntimeError, match=r"score was NaN.* rows \[0, 1, 2, 3, 4\]"):
        driven(nan_at(where), phases)


@pytest.mark.parametrize("phases", ["prefill_and_decode", "after_prefill"])
def test_nan_of_an_empty_slot_is_nothing(phases):
    driven(nan_at(lambda at: at < 0), phases)


def test_both_errors_are_noted_side_by_side():
    """One head ran over, another had no scores: neither bit hides the other."""
    state = cache.init(LAYER, make_spec(LAYER, None, None), 2, (4,))
    error = np.asarray([[cache.NAN_SCORE, cache.OVERFLOW], [0, 0]], np.uint32)
    with pytest.raises(RuntimeError, match=r"NaN .*rows \[0\]"):
        cache.raise_errors(state.replace(error=error))
    with pytest.raises(RuntimeError, match="no empty slot"):
        cache.raise_errors(state.replace(error=error & cache.OVERFLOW))


def test_a_chunk_with_a_pinned_pair_is_pinned():
    """Whatever the rule says of its other pairs, unless that is no number."""
    raw = jnp.asarray([[[jnp.inf, -jnp.inf, 1, 1, 3, 5, jnp.nan, 1]]], jnp.float32)
    at = jnp.arange(8, dtype=jnp.int32)[None, None]
    view = View(at, jnp.asarray([7]), jnp.asarray([[8]]))
    rule = policies.chunked(policies.stateless("mine", lambda view: raw), 2)
    score = np.asarray(rule.score(Stats(), view))[0, 0]
    assert score[:6].tolist() == [np.inf, np.inf, 1, 1, 4, 4]
    assert np.isnan(score[6])
