"""The contract that every policy fulfils under every schedule, codec and layout.

One layer on random data, see layer.py; test_engine.py has the same for whole models. A
policy is covered as soon as it is registered (by `make test-all` if OFTEN lacks it).
VARIANTS adds the combinators, and settings under which policies keep fewer pairs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often
from testing import layer, toys
from testing.pooled import POOLED
from testing.rules import POLICIES, VARIANTS

from kvjax import Schedule, cache, policies
from kvjax.cache.spec import make_spec

BUDGET, BLOCK, PROMPT, NEW = 56, 8, 104, 30
LENGTHS = (5, 56, 57, 70, 0, 101)  # below, at and above the budget; one row unused
SCHEDULES = ("prefill_and_decode", "after_prefill", "decode_only", "prefill_only")
FEWER = {  # policies that may keep fewer pairs than the budget
    *("fastgen", "fastgen small", "simlayerkv", "simlayerkv lazy", "per_head"),
    *("sliding_window", "sliding_window 20"),
    *("scissorhands_released", "scissorhands_released few"),
}
SPEC = layer.spec_of(heads=2, group=3, depth=8)
DATA = layer.random_data(SPEC, len(LENGTHS), PROMPT + NEW, seed=0)
OFTEN = (  # a policy for each kind of statistics
    *("streaming", "snapkv", "scissorhands", "fastgen", "average_attention", "tova"),
    *("key_diff", "expected_attention", "lag_kv", "random"),
)
QUICK = ("fastgen", "average_attention", "key_diff")  # under every schedule each time
LAYOUTS = {"halves": {"layout": toys.HALVES}}  # test_layouts.py has another
STORED = {  # how and where pairs are kept
    "dense": {},
    **LAYOUTS,
    "pooled": {"layout": POOLED},
    "halved_but_ends": {"codec": toys.HALVED_BUT_ENDS},
    **{name: {"codec": codec} for name, codec in toys.OF_8_CHANNELS.items()},
}
CASES = [(name, phases, "dense") for name in policies.names() for phases in SCHEDULES]
CASES += [(name, SCHEDULES[0], "dense") for name in VARIANTS]
SLOW = [each for each in CASES if each[0] not in OFTEN and each[1] != SCHEDULES[0]]
CASES = often(
    [each for each in CASES if each not in SLOW],
    [
        (name, phases, stored)
        for name, phases, stored in CASES
        if name in QUICK or (name in OFTEN and phases == SCHEDULES[0])
    ],
    others="e2e",
)
CASES += [pytest.param(each, marks=pytest.mark.slow) for each in SLOW]
ELSEWHERE = [  # other layouts and codecs: all policies in one, few in the others
    (name, SCHEDULES[i % 2], stored)
    for stored in (*LAYOUTS, "pooled", "halved_but_ends", "int8")
    for i, name in enumerate(POLICIES)
]
RARE = [each for each in ELSEWHERE if each[0] not in OFTEN and each[2] not in LAYOUTS]
CASES += often(ELSEWHERE, [], others="e2e", rarely=RARE)
CASES += often(  # one that looks at keys, and one that looks at attention
    [
        (name, SCHEDULES[i % 2], stored)
        for stored in toys.OF_8_CHANNELS
        for i, name in enumerate(("key_diff", "h2o"))
        if stored != "int8"
    ],
    [("key_diff", SCHEDULES[0], "int4_rotated")],
    others="e2e",
)


@functools.cache
def compressed(policy, phases, spec=SPEC, stored="dense", **options):
    schedule = Schedule(phases, prefill_chunk=BLOCK, evict_size=BLOCK)
    return make_spec(spec, policy, BUDGET, schedule, **STORED[stored], **options)


def run(config, data=DATA, lengths=LENGTHS, spec=SPEC, spoil=lambda state: state):
    """The states after the prompt, after compaction and at the end."""
    lengths = jnp.asarray(lengths, jnp.int32)
    prompts, new = layer.split(data, PROMPT)
    state = cache.init(
        spec,
        config,
        len(lengths),
        config.prefill_capacity(spec, PROMPT, NEW),
        jnp.asarray(data.k).dtype,
    )
    read = layer.read(spec, config, state, prompts, lengths, BLOCK)
    assert all(
        x.is_deleted() for x in jax.tree.leaves(state.layers)
    )  # a state that is not donated warns: an error
    small = read
    if config.schedule.compacts:
        small = layer.shrink(
            spec, config, read, config.decode_capacity(spec, PROMPT, NEW)
        )
    mine = jax.tree.map(jnp.copy, spoil(small))
    end = layer.write(spec, config, mine, new, lengths > 0)
    assert all(x.is_deleted() for x in jax.tree.leaves(mine.layers))
    cache.raise_errors(end)
    return read, small, end


def kept(state):
    """`[row][head]` -> sorted positions."""
    return [row[0] for row in cache.kept_positions(state)]


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def programs_compiled():
    return [f._cache_size() for f in (layer.read, layer.shrink, layer.write)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def case(request):
    """One policy under one schedule, and what it keeps of the six rows together."""
    name, phases, stored = request.param
    config = compressed(POLICIES[name], phases, stored=stored)
    return name, config, run(config)


def test_budget_shapes_and_dtypes(case):
    """Heads keep within the budget, as many pairs as the schedule says."""
    name, config, (read, small, end) = case
    phases = config.schedule.phases
    assert cache.capacities(end)[0] == config.decode_capacity(SPEC, PROMPT, NEW)[0]
    shown = end.layout.positions(end.layers[0])
    assert end.layout.keys(end.layers[0]).shape == (*shown.shape, SPEC.head_dim)
    like = jax.tree.map(lambda x: (x.shape, x.dtype), end.stats)
    fresh = cache.init(SPEC, config, len(LENGTHS), cache.capacities(end))
    assert like == jax.tree.map(lambda x: (x.shape, x.dtype), fresh.stats)
    for row, length in enumerate(LENGTHS):
        for state in (read, small, end):
            for head in kept(state)[row]:
                assert len(set(head.tolist())) == len(head)
                assert np.all((head >= 0) & (head < length + NEW))
        if length == 0:
            assert not any(map(len, kept(end)[row]))
            continue
        seen = length + NEW
        for before, head in zip(kept(small)[row], kept(end)[row], strict=True):
            assert head[-1] == seen - 1
            least = BUDGET if phases == "after_prefill" else BUDGET - BLOCK + 1
            if config.schedule.evicts_in_decode:
                assert len(head) <= BUDGET
                assert name in FEWER or len(head) >= min(least, seen)
            else:
                assert len(before) <= min(length, BUDGET)
                assert head.tolist() == [*before.tolist(), *range(length, seen)]
                assert name in FEWER or len(before) >= min(least, length)


WINDOW = 52  # fewer than the budget and a block: the policy still chooses
WITHIN = [(name, SCHEDULES[i % 4]) for i, name in enumerate(POLICIES)]


@pytest.mark.parametrize(
    ("name", "phases"),
    often(WITHIN, [WITHIN[list(POLICIES).index("key_diff")]], "e2e", several=True),
)
def test_what_has_left_a_window_is_gone(name, phases):
    """Every policy evicts pairs outside of the window, and enough others stay."""
    spec = dataclasses.replace(SPEC, sliding_windows=(WINDOW,))
    config = compressed(POLICIES[name], phases, spec)
    read, small, end = run(config, spec=spec)
    for state, new in ((read, 0), (small, 0), (end, NEW)):
        assert cache.capacities(state)[0] <= WINDOW + BLOCK
        for length, heads in zip(LENGTHS, kept(state), strict=True):
            for head in heads if length else ():
                assert np.all(head >= length + new - WINDOW)
                if name not in FEWER:  # those may evict the newest after the prompt
                    assert head[-1] == length + new - 1
                    assert len(head) >= min(BUDGET - BLOCK, length + new) - BLOCK


def test_a_row_does_not_see_its_neighbours(case):
    """A row keeps the same pairs alone, and in a batch of another order.

    No row alone compiles a program.
    """
    name, config, states = case
    if name in policies.names():  # a policy config again is the same policy
        again = compressed(policies.make(name), config.schedule.phases)
        assert again.policy == config.policy
    order = np.asarray([3, 0, 5, 4, 1, 2])
    rows = {"q", "k", "v", "tokens"}
    moved = DATA._replace(**{f: getattr(DATA, f)[order] for f in rows})
    shuffled = run(config, moved, [LENGTHS[i] for i in order])
    compiled = programs_compiled()  # now: the case's own may have gone between tests
    for state, other in zip(states, shuffled, strict=True):
        together = kept(state)
        same(kept(other), [together[i] for i in order])
    for row in (1, 3, 5):
        lengths = [n if i == row else 0 for i, n in enumerate(LENGTHS)]
        for state, alone in zip(states, run(config, DATA, lengths), strict=True):
            same(kept(alone)[row], kept(state)[row])
    assert programs_compiled() == compiled


def test_heads_permute(case):
    """Policies ignore the order of heads; only `random` draws by the head's number."""
    name, config, states = case
    turned = DATA._replace(
        q=DATA.q[:, ::-1], k=DATA.k[:, ::-1], v=DATA.v[:, ::-1], out=DATA.out[::-1]
    )
    for state, other in zip(states, run(config, turned), strict=True):
        straight = [row[::-1] for row in kept(state)]
        if name != "random":
            same(kept(other), straight)
    if name == "random":
        assert any(map(len, straight)) and not equal(kept(other), straight)


def test_empty_slots_are_never_looked_at(case):
    """The contents of empty slots change nothing."""
    _, config, states = case
    *_, end = run(config, spoil=toys.spoiled)
    same(kept(end), kept(states[2]))
    assert np.any(end.layout.positions(states[1].layers[0]) < 0)


@pytest.mark.parametrize("name", often(POLICIES, OFTEN[1:4], others="e2e"))
def test_ways_to_make_room_agree(name):
    """In-place and compacting eviction keep the same pairs, even where scores tie.

    With equal queries, keys and values, all scores tie but those of positions.
    """
    reuse = compressed(POLICIES[name], "prefill_and_decode")
    gather = compressed(POLICIES[name], "prefill_and_decode", eviction="compact")
    same(kept(run(gather)[2]), kept(run(reuse)[2]))
    alike = DATA._replace(
        q=np.ones_like(DATA.q), k=np.ones_like(DATA.k), v=np.ones_like(DATA.v)
    )
    same(kept(run(gather, alike)[2]), kept(run(reuse, alike)[2]))


@pytest.mark.parametrize("stored", LAYOUTS)
@pytest.mark.parametrize("name", often(POLICIES, OFTEN[4:5], others="e2e"))
def test_layouts_keep_the_same_pairs(name, stored):
    dense, other = (
        run(compressed(POLICIES[name], "prefill_and_decode", stored=where))
        for where in ("dense", stored)
    )
    for state, also in zip(dense, other, strict=True):
        same(kept(also), kept(state))


@pytest.mark.parametrize(
    ("group", "dtype"),
    often([(1, "float32"), (8, "bfloat16")], [(8, "bfloat16")], "slow", several=True),
)
@pytest.mark.parametrize("name", often(policies.names(), OFTEN[3:5], others="e2e"))
def test_groups_dtypes_and_pinned_pairs(name, group, dtype):
    """`protect` keeps its pairs under any policy, for any G and dtype."""
    spec = layer.spec_of(heads=2, group=group, depth=8)
    data = layer.random_data(spec, 2, PROMPT + NEW, seed=1)
    data = jax.tree.map(
        lambda x: jnp.asarray(x, dtype) if x.dtype == np.float32 else x, data
    )
    small = policies.make(name, **SMALL.get(name, {}))
    config = compressed(policies.protect(small, 3, 5), "prefill_and_decode", spec)
    lengths = (40, 101)
    *_, end = run(config, data, lengths, spec)
    assert str(end.layers[0].k.dtype) == dtype
    for length, row in zip(lengths, kept(end), strict=True):
        newest = length + NEW - 1
        pinned = {0, 1, 2, *range(newest - 4, newest + 1)}
        assert all(pinned <= set(head.tolist()) for head in row)
        assert all(len(head) <= BUDGET for head in row)


@pytest.mark.e2e
@pytest.mark.parametrize("name", policies.names())
def test_jit_equals_eager(name):
    """Three blocks, with an eviction before the last."""
    small = policies.make(name, **SMALL.get(name, {}))
    config = make_spec(SPEC, small, BUDGET, Schedule(prefill_chunk=24, evict_size=24))
    prompts, _ = layer.split(DATA, 3 * 24)

    def read():
        state = cache.init(SPEC, config, len(LENGTHS), config.budget)
        lengths = jnp.asarray(LENGTHS, jnp.int32)
        return layer.read(SPEC, config, state, prompts, lengths, 24)

    fast = read()
    with jax.disable_jit():
        slow = read()
    same(kept(fast), kept(slow))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), fast, slow
    )


SMALL = {  # for budgets that leave few pairs
    "chunk_kv": {"size": 2, "window": 3},
    "criticalkv": {"policy": policies.snapkv(3)},
    "lag_kv": {"sinks": 2, "lag": 8},
    "r_kv": {"window": 3},
    "roco": {"recent": 3},
    "scissorhands": {"recent": 3},
    "scissorhands_released": {"recent": 3},
    "snapkv": {"window": 3},
}


def equal(a, b) -> bool:
    try:
        same(a, b)
    except AssertionError:
        return False
    return True
