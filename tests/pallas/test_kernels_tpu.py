"""The TPU kernels, interpreted on the CPU, against float64 and the reference."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from testing import kernels
from testing.kernels import STATS, TOLERANCE, by_hand, check, draw, finite, generated

from kvjax import attention, policies
from kvjax.attention import AttentionSpec, Pairs
from kvjax.pallas import tpu
from kvjax.policies.base import select_evictions
from kvjax.types import Scoring, View

pytestmark = pytest.mark.kernels

SMALL = tpu.Tiles(pairs=2 * 128 * 64 * 4, rows=32)  # several tiles, several parts


def run(case, stats=STATS, tiles=SMALL, interpret=True):
    return tpu.attend(*case, stats=stats, tiles=tiles, interpret=interpret)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    heads=st.sampled_from([1, 3]),
    group=st.sampled_from([1, 3, 4, 8]),
    length=st.sampled_from([1, 1, 5, 16, 40]),
    slots=st.sampled_from([1, 7, 128, 200, 300]),
    depth=st.sampled_from([64, 80, 96, 128, 256]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_agrees_with_float64(seed, heads, group, length, slots, depth, dtype):
    """Any shape; empty slots hold NaN, some rows see nothing, some queries pad."""
    case = draw(seed, heads, group, length, slots, depth, dtype)
    check(run(case), case)


@pytest.mark.parametrize("length", [1, 16])
def test_rows_without_a_slot_and_with_one(length):
    q, k, v, pos, q_pos, n = draw(0, 2, 3, length, 64, 64)
    pos = jnp.full_like(pos, -1).at[1, 0, 17].set(0)
    k, v = jnp.full_like(k, jnp.nan), jnp.full_like(v, jnp.nan)
    k, v = k.at[1, 0, 17].set(1.0), v.at[1, 0, 17].set(2.0)
    case = (q, k, v, pos, q_pos, jnp.full_like(n, length))
    found = run(case)
    check(found, case)
    assert jnp.all(jnp.isneginf(found.max_logit[0])) and jnp.all(
        found.denominator[0] == 0
    )
    np.testing.assert_allclose(found.attn_sum[1, 0, 17], length, rtol=1e-6)


@pytest.mark.parametrize("length", [1, 16])
def test_without_statistics(length):
    case = draw(1, 2, 3, length, 200, 64)
    plain, scored = run(case, frozenset()), run(case)
    check(plain, case, frozenset())
    np.testing.assert_array_equal(plain.out, scored.out)


@pytest.mark.parametrize("length", [1, 16])
def test_is_deterministic(length):
    case = draw(2, 2, 3, length, 200, 64, "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, run(case), run(case))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [1, 16])
def test_agrees_with_the_reference(length, dtype):
    case = finite(draw(3, 3, 4, length, 300, 128, dtype))
    (a, seen_a), (b, seen_b) = (
        attention.attend(*kernels.arguments(case), AttentionSpec(STATS, name))
        for name in ("reference", "pallas_tpu_interpret")
    )
    allowed = TOLERANCE[dtype]
    whole = [attention.normalize(x) for x in (a, b)]
    np.testing.assert_allclose(*whole, atol=3 * allowed["out"])
    for name in STATS:
        pair = getattr(seen_a, name), getattr(seen_b, name)
        np.testing.assert_allclose(*pair, atol=allowed["stats"])


@pytest.mark.parametrize("length", [1, 13])
@pytest.mark.parametrize("name", ["reference", "pallas_tpu_interpret"])
@pytest.mark.parametrize(
    "cuts", often([(0, 100, 300), (0, 37, 40, 300)], [(0, 37, 40, 300)])
)
def test_segments(length, name, cuts):
    """Statistics over segments are those of one softmax over all of them."""
    case = draw(4, 2, 3, length, 300, 64)
    queries, pairs = kernels.arguments(finite(case))
    segments = [
        Pairs(*(x[:, :, a:b] for x in pairs)) for a, b in itertools.pairwise(cuts)
    ]
    spec = AttentionSpec(STATS, name)
    whole, seen = attention.attend_segments(queries, segments, spec)
    out, expected = by_hand(*case)
    np.testing.assert_allclose(attention.normalize(whole), out, atol=3e-6)
    for stat in STATS:
        joined = np.concatenate([getattr(part, stat) for part in seen], axis=-1)
        np.testing.assert_allclose(joined, expected[stat], atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "pallas_tpu_interpret"])
@pytest.mark.parametrize(
    "scoring", [Scoring(local_window=40), Scoring(0.7, 90)], ids=str
)
@pytest.mark.parametrize("length", [1, 13])
def test_capped_scores_and_windows(length, scoring, name):
    case = draw(7, 2, 3, length, 200, 64)
    out, expected = by_hand(*case, scoring=scoring)
    queries, pairs = kernels.arguments(finite(case))
    spec = AttentionSpec(STATS, name, scoring)
    found, seen = attention.attend(queries, pairs, spec)
    np.testing.assert_allclose(attention.normalize(found), out, atol=3e-6)
    for stat in STATS:
        np.testing.assert_allclose(getattr(seen, stat), expected[stat], atol=1e-5)
    again = attention.attention_stats(queries, pairs, found, spec)
    for stat in STATS:
        np.testing.assert_allclose(getattr(again, stat), expected[stat], atol=1e-5)


def write_case(seed, depth, dtype="float32", slots=256):
    """A case whose rows write to the middle, the ends, and nowhere."""
    q, k, v, pos, q_pos, n = finite(draw(seed, 2, 3, 1, slots, depth, dtype))
    new = jax.random.normal(jax.random.key(seed), (2, 2, 2, depth), dtype)
    slot = jnp.array([[3, slots - 1], [slots, 0]], jnp.int32)
    hit = jnp.arange(slots, dtype=jnp.int32)[None, None] == slot[..., None]
    pos = jnp.where(hit, q_pos[:, :, None], pos)
    return (q, *new, slot, k, v, pos, q_pos, n), hit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("depth", [64, 96, 128])
def test_fused_write(depth, dtype):
    """The new pair is in its slot, nothing else has moved, and attention saw it."""
    (q, new_k, new_v, slot, k, v, pos, q_pos, n), hit = write_case(5, depth, dtype)
    found = tpu.write_attend(
        *(q, new_k, new_v, slot, k, v, pos, q_pos, n),
        stats=STATS,
        tiles=SMALL,
        interpret=True,
    )
    k = jnp.where(hit[..., None], new_k[:, :, None], k)
    v = jnp.where(hit[..., None], new_v[:, :, None], v)
    np.testing.assert_array_equal(found.k, k)
    np.testing.assert_array_equal(found.v, v)
    check(found.scored, (q, k, v, pos, q_pos, n))


def test_fused_write_wants_whole_memory_tiles():
    args, _ = write_case(5, 64, slots=200)
    with pytest.raises(ValueError, match="multiple of 128"):
        tpu.write_attend(*args, interpret=True)


RULES = {
    "average_attention": (policies.average_attention(), tpu.Pick(mean=True)),
    "h2o": (policies.h2o(recent=0.5), tpu.Pick(mean=False, recent=63)),
}


@pytest.mark.parametrize("name", often(RULES, ["average_attention"]))
def test_picks_the_victims_of_the_policy(name):
    """Write, attend, score and pick in one kernel, step after step.

    The slots are the ones that the policy gives up, one pair at a time.
    """
    policy, pick = RULES[name]
    slots, depth, heads = 128, 64, 2
    k, v = jnp.zeros((2, 1, heads, slots, depth))
    pos = jnp.full((1, heads, slots), -1, jnp.int32)
    total, one = jnp.zeros(pos.shape), jnp.ones((1,), jnp.int32)
    slot = jnp.zeros((1, heads), jnp.int32)
    step = jax.jit(
        lambda *args, total: tpu.write_attend(
            *args, total=total, pick=pick, interpret=True
        )
    )
    for i in range(slots + 24):
        if i >= slots:
            view = View(
                positions=pos,
                query_position=one * (i - 1),
                num_keep=jnp.full((1, heads), slots - 1),
            )
            score = policy.score(
                policy.init(_Spec, 1, slots)._replace(per_slot=total), view
            )
            gone = select_evictions(score, pos, one)
            np.testing.assert_array_equal(jnp.argmax(gone, -1), slot)
        hit = jnp.arange(slots, dtype=jnp.int32)[None, None] == slot[..., None]
        pos = jnp.where(hit, i, pos)
        q = jax.random.normal(jax.random.key(i), (1, heads, 3, 1, depth))
        new = jax.random.normal(jax.random.key(-i), (2, 1, heads, depth))
        found = step(q, *new, slot, k, v, pos, one[:, None] * i, one, total=total)
        k, v, total, slot = found.k, found.v, found.total, found.next_slot
    check(
        found.scored._replace(attn_sum=None), (q, k, v, pos, one[:, None] * i, one), ()
    )


class _Spec:
    num_kv_heads, queries_per_kv_head, head_dim = 2, 3, 64


@pytest.mark.parametrize("kind", ["decode", "block", "write"])
def test_no_races(kind):
    """The interpreter watches every access to memory that kernel and DMA share."""
    watch = pltpu.InterpretParams(detect_races=True)
    if kind == "write":
        args, hit = write_case(6, 64)
        found = tpu.write_attend(*args, stats=STATS, tiles=SMALL, interpret=watch)
        new, old = args[1][:, :, None], args[4]  # a copy that is not waited for is lost
        np.testing.assert_array_equal(found.k, jnp.where(hit[..., None], new, old))
    else:
        case = draw(6, 2, 3, 1 if kind == "decode" else 40, 300, 64)
        check(run(case, interpret=watch), case)
    assert not interpret_pallas_call.races.races_found


POLICIES = {
    "average_attention": policies.average_attention(),
    "roco": policies.roco(recent=4),
    "tova": policies.tova(),
    "streaming": policies.streaming(sinks=2),
    "key_diff": policies.key_diff(),
}


@pytest.mark.parametrize(
    "case",
    often(
        [
            *((name, "prefill_and_decode") for name in POLICIES),
            ("roco", "after_prefill"),
        ],
        [("average_attention", "prefill_and_decode"), ("roco", "after_prefill")],
    ),
    ids="-".join,
)
def test_generates_what_the_reference_does(case):
    """The same tokens and the same kept pairs, through prefill and decode."""
    name, phases = case
    model = tiny_model(head_dim=128)
    a, kept_a, logits_a = generated(model, POLICIES[name], phases, "reference")
    b, kept_b, logits_b = generated(
        model, POLICIES[name], phases, "pallas_tpu_interpret"
    )
    np.testing.assert_array_equal(a, b)
    jax.tree.map(np.testing.assert_array_equal, kept_a, kept_b)
    np.testing.assert_allclose(logits_a, logits_b, atol=1e-4)
