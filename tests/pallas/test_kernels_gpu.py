"""The GPU kernels, interpreted, against the reference.

No GPU is needed. The interpreter runs the kernels' own bodies, with a plain product in
place of the tensor core's; reads past the end of the cache give NaN there.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.kernels import arguments, by_hand, shapes, stored

from kvjax.attention import AttentionSpec, attend, normalize
from kvjax.attention.reference import PLAIN
from kvjax.attention.stored import decoded
from kvjax.cache import codecs
from kvjax.pallas import gpu, gpu_launch, gpu_tiles
from kvjax.pallas.common import STATS
from kvjax.types import Partial, Scoring

pytestmark = pytest.mark.kernels

ALL = frozenset(STATS)
SOFTMAX = Partial._fields
CHIP = gpu.CHIPS["H200"]

# The output is relative to the largest weight, 1; statistics of either dtype are sums
# of float32 weights, of scores that float32 adds up.
OUTPUT = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}
STATISTIC = {jnp.float32: 1e-5, jnp.bfloat16: 1e-5}

#         B  K  G  C    D
DECODE = [
    (2, 2, 3, 128, 64),
    (2, 1, 4, 200, 64),
    (1, 2, 1, 40, 128),
    (1, 1, 8, 328, 128),
    (1, 2, 1, 200, 96),
    (1, 1, 3, 136, 80),
    (1, 1, 2, 72, 24),  # the interpreter takes any head dim
]
#        B  K  G  T    C    D
BLOCKS = [
    (2, 1, 3, 64, 128, 64),
    (1, 2, 4, 100, 200, 64),
    (1, 1, 8, 64, 136, 128),
    (2, 1, 1, 130, 40, 64),
    (1, 2, 1, 64, 200, 96),
    (1, 1, 3, 70, 136, 80),
]


class Case:
    """Random queries against a cache with empty slots, which hold NaN."""

    def __init__(self, b, k, g, t, c, d, dtype=jnp.float32, seed=0, live=0.8, n=None):
        draw = np.random.default_rng(seed)
        normal = lambda *shape: np.asarray(draw.standard_normal(shape), dtype)
        self.q, self.k, self.v = (
            normal(b, k, g, t, d),
            normal(b, k, c, d),
            normal(b, k, c, d),
        )
        order = draw.permuted(np.tile(np.arange(c), (b, k, 1)), axis=-1)
        self.pos = np.where(draw.random((b, k, c)) < live, order, -1).astype(np.int32)
        self.q_pos = np.arange(t)[None] + draw.integers(c // 2, c, (b, 1))
        self.q_pos = self.q_pos.astype(np.int32)
        self.n = draw.integers(1, t + 1, b) if n is None else np.full(b, n)
        self.n = self.n.astype(np.int32)
        self.dtype = dtype

    def run(self, stats=ALL, scoring=PLAIN):
        empty = (self.pos < 0)[..., None]
        nan = lambda x: np.where(empty, np.asarray(np.nan, x.dtype), x)
        arrays = (self.q, nan(self.k), nan(self.v), self.pos, self.q_pos, self.n)
        return interpreted(stats, scoring)(*arrays)

    def check(self, scoring=PLAIN):
        scored = self.run(scoring=scoring)
        arrays = (self.q, self.k, self.v, self.pos, self.q_pos, self.n)
        out, stats = by_hand(*arrays, scoring=scoring)
        got = normalize(Partial(scored.out, scored.max_logit, scored.denominator))
        np.testing.assert_allclose(got, out, atol=OUTPUT[self.dtype])
        for name, want in stats.items():
            have = getattr(scored, name)
            assert have.dtype == jnp.float32 and have.shape == self.pos.shape
            atol = STATISTIC[self.dtype]
            np.testing.assert_allclose(have, want, atol=atol, err_msg=name)
        return scored


@functools.cache
def interpreted(stats, scoring):
    """Waits: the interpreter calls back, and hangs if others dispatch meanwhile."""
    options = {"stats": stats, "interpret": True, **scoring._asdict()}
    run = jax.jit(lambda *arrays: gpu.attend(*arrays, **options))
    return lambda *arrays: jax.block_until_ready(run(*arrays))


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("shape", DECODE, ids=str)
def test_decode(shape):
    b, k, g, c, d = shape
    Case(b, k, g, 1, c, d).check()
    if c == 200:
        Case(b, k, g, 1, c, d, jnp.bfloat16).check()


@pytest.mark.parametrize("shape", BLOCKS, ids=str)
def test_block(shape):
    Case(*shape).check()
    if shape[4] == 200:
        Case(*shape, jnp.bfloat16).check()


@pytest.fixture
def settings_of_the_interpreter(monkeypatch):
    """A function that changes them for one test."""

    def change(**fields):
        changed = dataclasses.replace(gpu_launch._interpreter(), **fields)
        monkeypatch.setattr(gpu_launch, "_interpreter", lambda: changed)
        interpreted.cache_clear()

    yield change
    interpreted.cache_clear()


@pytest.mark.parametrize("t", [1, 64])
def test_zeros_past_the_end(t, settings_of_the_interpreter):
    """As on hardware, where a slot past the end reads as a live one at position 0."""
    settings_of_the_interpreter(uninitialized_memory="zero")
    Case(1, 1, 2, t, 72, 64, live=0.1).check()


@pytest.mark.parametrize("t", [1, 64])
def test_copies_and_their_readers_do_not_race(t, settings_of_the_interpreter):
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    settings_of_the_interpreter(detect_races=True)
    Case(1, 1, 2, t, 520 if t == 1 else 136, 64).run()
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("t", often([1, 64], [1]))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_agrees_with_the_reference(t, dtype):
    case = Case(2, 2, 3, t, 136, 64, dtype, seed=1)
    scored = case.run()
    arrays = map(jnp.asarray, (case.q, case.k, case.v, case.pos, case.q_pos, case.n))
    want, seen = attend(*arguments(arrays), AttentionSpec(ALL, "reference"))
    for name in SOFTMAX:
        have, expected = getattr(scored, name), getattr(want, name)
        assert have.shape == expected.shape and have.dtype == expected.dtype
        scale = 1 if name == "max_logit" else 100  # the others are sums of many terms
        atol = OUTPUT[dtype] * scale
        np.testing.assert_allclose(have, expected, atol=atol, err_msg=name)
    for name in ALL:
        have, expected = getattr(scored, name), getattr(seen, name)
        np.testing.assert_allclose(have, expected, atol=STATISTIC[dtype], err_msg=name)


@pytest.mark.parametrize("t", [1, 64])
def test_no_live_slot(t):
    scored = Case(2, 1, 3, t, 72, 64, live=0.0).check()
    assert np.all(np.isneginf(scored.max_logit))
    assert not np.any(scored.denominator) and not np.any(scored.out)
    assert not any(np.any(getattr(scored, name)) for name in ALL)


@pytest.mark.parametrize(("t", "slot"), [(1, 0), (1, 70), (64, 70)])
def test_one_live_slot(t, slot):
    case = Case(1, 1, 2, t, 72, 64, live=0.0, n=t)
    case.pos[..., slot] = 0
    scored = case.check()
    np.testing.assert_array_equal(scored.denominator, 1.0)
    np.testing.assert_allclose(scored.attn_sum[..., slot], t, rtol=1e-6)


@pytest.mark.parametrize("t", often([1, 70], [70]))
def test_rows_with_no_real_query_have_no_statistics(t):
    case = Case(2, 2, 3, t, 64, 64)
    case.n[:] = 0, t
    scored = case.check()
    for name in ALL:
        found = np.asarray(getattr(scored, name))
        assert not found[0].any() and found[1].any(), name


@pytest.mark.parametrize("t", [1, 64])
def test_only_the_statistics_asked_for(t):
    case = Case(1, 2, 3, t, 72, 64)
    full = case.run()
    for stats in (frozenset(), frozenset({"attn_sq_sum", "last_attn"})):
        some = case.run(stats)
        assert {name for name in STATS if getattr(some, name) is not None} == stats
        for name in {*SOFTMAX, *stats}:
            assert bits(getattr(some, name)) == bits(getattr(full, name)), name


def test_split_segments(monkeypatch):
    """A head's slots over several thread blocks, then over one: the same."""
    case = Case(1, 2, 3, 1, 776, 64)
    assert gpu.cut(2, 776, 64, CHIP)[:2] == (3, 5)
    case.pos[:, 0, :330] = -1  # nothing in the first segment
    split = case.check()
    monkeypatch.setitem(gpu.CHIPS, "H200", CHIP._replace(processors=1))
    assert gpu.cut(2, 776, 64, gpu.CHIPS["H200"])[:2] == (1, 13)
    whole = case.check()
    for name in (*SOFTMAX, *STATS):
        have, want = getattr(split, name), getattr(whole, name)
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ["int8", "k8v4"])
def test_split_segments_of_codes(name):
    """Keys and values of one ring, and of two."""
    case, codec = Case(1, 2, 3, 1, 776, 64), codecs.make(name)
    given = case.q, case.k, case.v, case.pos, case.q_pos, case.n
    q, k, v, *rest = (jnp.asarray(x) for x in given)
    k, v = stored(codec, k, v)
    found = interpreted(ALL, PLAIN)(q, k.arrays, v.arrays, *rest)
    out, stats = by_hand(q, decoded(k), decoded(v), *rest)
    got = normalize(Partial(found.out, found.max_logit, found.denominator))
    np.testing.assert_allclose(got, out, atol=1e-5)
    for stat, want in stats.items():
        np.testing.assert_allclose(getattr(found, stat), want, atol=1e-5)


ROOMS = {
    "numbers": lambda width: None,
    "int8": lambda width: gpu.RingSize(width + 2, 1),
    "k8v4": lambda width: gpu.RingSize(width + 2 + width * 9 // 16, 2),
    "int2": lambda width: gpu.RingSize(width * 5 // 16, 1),
}


@pytest.mark.parametrize("heads", [1, 8, 100, 132, 512])
@pytest.mark.parametrize("slots", [8, 64, 1000, 2048, 8192, 100_000])
@pytest.mark.parametrize("width", gpu.WIDTHS)
@pytest.mark.parametrize("name", ROOMS)
def test_the_cut_covers_the_slots_and_fits(heads, slots, width, name):
    room = ROOMS[name](width)
    for chip in gpu.CHIPS.values():
        segments, tiles, stages = gpu.cut(heads, slots, width, chip, room)
        assert (segments - 1) * tiles * 64 < slots <= segments * tiles * 64
        per_slot = 4 * 8
        number = 2 * gpu_tiles.whole_width(width)
        slot, wide = room or (number, 0)
        used = 64 * (stages * slot + wide * number + tiles * per_slot)
        assert stages >= 2 and used <= chip.shared
        if segments > 1 and slots <= (1000 if room else 2048):
            assert heads * segments <= chip.processors + heads


@pytest.mark.parametrize("t", [1, 64])
def test_two_runs_are_bitwise_equal(t):
    case = Case(2, 1, 4, t, 520 if t == 1 else 136, 64, jnp.bfloat16)
    assert bits(case.run()) == bits(case.run())


def test_rows_do_not_depend_on_their_neighbours():
    case = Case(3, 1, 2, 1, 200, 64)
    together = case.run()
    for name in ("q", "k", "v", "pos", "q_pos", "n"):
        setattr(case, name, getattr(case, name)[1:2])
    alone = case.run()
    for name in (*SOFTMAX, *STATS):
        have, want = getattr(together, name)[1:2], getattr(alone, name)
        np.testing.assert_allclose(have, want, rtol=1e-6, atol=1e-6, err_msg=name)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_positions_and_lengths(data):
    t = data.draw(st.sampled_from([1, 64]))
    case = Case(2, 1, 2, t, 72, 64, seed=2)
    slot = st.integers(-1, 100)
    for row in range(2):
        live = data.draw(st.lists(slot, min_size=72, max_size=72))
        case.pos[row] = np.array(live, np.int32)
        case.n[row] = data.draw(st.integers(0, t))
    case.q_pos = case.q_pos - data.draw(st.integers(0, 60))
    case.check()


SCORINGS = [Scoring(local_window=40), Scoring(0.7, 90), Scoring(logits_soft_cap=50.0)]


@pytest.mark.parametrize("t", [1, 64])
@pytest.mark.parametrize("scoring", often(SCORINGS, SCORINGS[:2]), ids=str)
def test_capped_scores_and_windows(t, scoring):
    case = Case(1, 2, 3, t, 136, 64)
    found = case.check(scoring)
    if scoring.local_window:  # one that hides nothing would test nothing
        assert np.any(found.denominator != case.run().denominator)


def test_scores_far_beyond_the_cap():
    """exp(2 x) overflows to infinity on one side, and vanishes on the other."""
    case = Case(1, 1, 2, 1, 136, 64)
    case.q = case.q * 1000
    case.check(Scoring(logits_soft_cap=2.0))


def test_a_split_head_knows_its_window():
    case = Case(1, 2, 3, 1, 776, 64)
    assert gpu.cut(2, 776, 64, CHIP).segments == 3
    case.check(Scoring(0.7, 90))


@pytest.mark.parametrize("t", often([1, 70], [70]))
@pytest.mark.parametrize("scoring", often([PLAIN, SCORINGS[1]], SCORINGS[1:2]), ids=str)
def test_weights_under_a_given_softmax(t, scoring):
    """The statistics of two segments are those of one softmax over both."""
    case = Case(2, 2, 3, t, 136, 64)
    whole = case.run(scoring=scoring)
    q, q_pos, n = case.q, case.q_pos, case.n
    options = {"stats": ALL, "interpret": True, **scoring._asdict()}
    run = jax.jit(functools.partial(gpu.attention_stats, **options))
    parts = [
        jax.block_until_ready(
            run(
                q,
                case.k[:, :, at],
                case.pos[:, :, at],
                q_pos,
                n,
                whole.max_logit,
                whole.denominator,
            )
        )
        for at in (slice(0, 64), slice(64, None))
    ]
    for name in ALL:
        found = np.concatenate([part[name] for part in parts], axis=-1)
        np.testing.assert_allclose(found, getattr(whole, name), atol=2e-6)


def test_refusals():
    def reason(*shape, stats=ALL, device="NVIDIA H100", dtype=jnp.bfloat16):
        q, k = shapes(*shape, dtype=dtype)[:2]
        return gpu.unsupported_reason(q, k, stats, device)

    for width in gpu.WIDTHS:
        for group in (1, 3, 4, 8):
            assert reason(2, 2, group, 1, 200, width) is None
            assert reason(2, 2, group, 100, 200, width, device="NVIDIA H200") is None
    assert "TF32" in reason(1, 1, 1, 1, 64, 64, dtype=jnp.float32)
    assert "float16" in reason(1, 1, 1, 1, 64, 64, dtype=jnp.float16)
    assert "head dimension is 72" in reason(1, 1, 1, 1, 64, 72)
    assert "9 query heads" in reason(1, 1, 9, 1, 64, 64)
    assert reason(1, 1, 9, 64, 64, 64) is None
    for capacity in (56, 63, 65):
        assert f"capacity {capacity}" in reason(1, 1, 1, 1, capacity, 64)
    assert "TPU v5e" in reason(1, 1, 1, 1, 64, 64, device="TPU v5e")
    assert "weights" in reason(1, 1, 1, 1, 64, 64, stats=frozenset({"attn_weights"}))
    with pytest.raises(ValueError, match="TF32"):
        run = functools.partial(gpu.attend, device_kind="H200")
        jax.eval_shape(run, *shapes(1, 1, 1, 1, 64, 64, dtype=jnp.float32))
