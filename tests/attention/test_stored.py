"""Attention over pairs as they are stored, against float64 on what these decode to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_model
from testing.kernels import (
    STATS,
    TOLERANCE,
    arguments,
    by_hand,
    check,
    draw,
    finite,
    generated,
    stored,
)

from kvjax import attention, policies
from kvjax.attention import AttentionSpec, Pairs, Queries, reference
from kvjax.attention.stored import Stored, decoded, unturned
from kvjax.cache import codecs
from kvjax.cache.layouts import dense
from kvjax.pallas import tpu
from kvjax.types import EMPTY, Scoring

KERNEL = "pallas_tpu_interpret"
KERNELS = [KERNEL, "pallas_gpu_interpret"]
CODECS = {
    "int8": codecs.int8(),
    "int8_in_groups": codecs.int8(16),
    "int4": codecs.int4(),
    "int4_centred": codecs.int4(symmetric=False),
    "int4_rotated": codecs.int4_rotated(),
    "int2_even": codecs.int2(symmetric=True),
    "fp8": codecs.fp8(),
    "k8v4": codecs.k8v4(),
    "turned_values": codecs.pair("fp8", "int4_rotated"),
}
READ_AS_CODES = set(CODECS) - {"int4_centred", "fp8", "turned_values"}


def of(name, length, depth=64, dtype="float32", slots=200):
    """A case under a codec, and the same in decoded numbers."""
    q, k, v, *rest = finite(draw(3, 2, 3, length, slots, depth, dtype))
    k, v = stored(CODECS[name], k, v)
    return (q, k, v, *rest), (q, decoded(k), decoded(v), *rest)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize(
    "implementation", often(["tiles", "reference", "xla"], ["tiles"], "e2e")
)
@pytest.mark.parametrize("name", often(CODECS, ["k8v4", "turned_values"], "e2e"))
def test_is_attention_over_what_it_decodes_to(
    monkeypatch, name, implementation, length
):
    """Tiles of 64 of 200 slots, rows one at a time."""
    monkeypatch.setattr(reference, "TILE", 64)
    monkeypatch.setattr(reference, "MANY", 64)
    monkeypatch.setattr(reference, "PIECE", 1)
    case, numbers = of(name, length)
    stats = STATS if implementation != "xla" else frozenset()
    for asked in {stats, frozenset()}:
        spec = AttentionSpec(asked, implementation)
        partial, seen = jax.jit(attention.attend)(*arguments(case), spec)
        out, expected = by_hand(*numbers)
        np.testing.assert_allclose(attention.normalize(partial), out, atol=1e-5)
        for stat in asked:
            np.testing.assert_allclose(getattr(seen, stat), expected[stat], atol=1e-5)


def test_codes_are_read_on_the_grid_that_they_lie_on():
    """Not those of a codec that decodes them otherwise, or turns them."""
    inner = codecs.int8().key
    mine = codecs.TensorCodec(
        "mine", inner.init, inner.encode, lambda *stored: 2 * inner.decode(*stored)
    )
    x = jnp.ones((1, 1, 4, 64))
    turned, centred = codecs.int4_rotated().key, codecs.int2().key
    for tensor, read in (
        (inner, True),
        (mine, False),
        (turned, False),
        (centred, False),
    ):
        pairs = Stored(tensor.encode(x), tensor, x.shape, x.dtype)
        assert (pairs.codes is not None) == read
        assert (unturned(pairs)[0].codes is not None) == (read or tensor is turned)


READ = [
    (name, depth, length)
    for name in CODECS
    for depth in (64, 128)
    for length in (1, 16)
]
BOTH = [("int8", 128), ("int4", 64)]  # a step and a block; of the others one, by turns
READ_OFTEN = [(*each, length) for each in BOTH for length in (1, 16)] + [
    (name, (128, 64)[i % 2], (1, 16)[i // 2 % 2]) for i, name in enumerate(CODECS)
]


@pytest.mark.kernels
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("name", "depth", "length"), often(READ, READ_OFTEN, "slow", several=True)
)
def test_kernels_read_codes(name, depth, length, kernel):
    case, numbers = of(name, length, depth, slots=300)
    scoring = Scoring(logits_soft_cap=2.0, local_window=250)
    (queries, pairs), spec = arguments(case), AttentionSpec(STATS, kernel, scoring)
    partial, seen = jax.block_until_ready(attention.attend(queries, pairs, spec))
    out, expected = by_hand(*numbers, scoring=scoring)
    np.testing.assert_allclose(attention.normalize(partial), out, atol=1e-5)
    again = attention.attention_stats(queries, pairs, partial, spec)
    for stat in STATS:
        for found in (seen, again):
            np.testing.assert_allclose(getattr(found, stat), expected[stat], atol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_kernels_round_codes_to_nothing_else(name):
    """bfloat16 holds all codes, and scales stay outside; several tiles."""
    (q, k, v, *rest), _ = of(name, 1, 128, "bfloat16", slots=300)
    exact = (x.codec.decode(x.arrays, jnp.dtype("float32")) for x in (k, v))
    numbers = q, *exact, *rest
    tiles = tpu.Tiles(pairs=2 * 128 * 128)
    given = q, k.arrays, v.arrays, *rest
    check(tpu.attend(*given, stats=STATS, tiles=tiles, interpret=True), numbers)


@pytest.mark.parametrize(
    "implementation",
    ["tiles", *(pytest.param(name, marks=pytest.mark.kernels) for name in KERNELS)],
)
def test_what_is_no_number(implementation):
    """NaN among a head's live pairs shows; in the kernel's empty slots it does not."""
    (q, k, v, pos, *rest), numbers = of("int4", 1)
    here = jnp.zeros(pos.shape, bool).at[0, 0, 7].set(True)
    spoilt = [
        x.replace(
            arrays=x.arrays._replace(
                scale=jnp.where(here[..., None], jnp.nan, x.arrays.scale)
            )
        )
        for x in (k, v)
    ]
    live = jnp.where(here, 0, pos)  # the oldest, which every query sees
    spec = AttentionSpec(STATS, implementation)
    found, _ = attention.attend(*arguments((q, *spoilt, live, *rest)), spec)
    broken = np.isnan(attention.normalize(found))
    assert np.all(broken[0, 0]) and not np.any(broken[1]) and not np.any(broken[0, 1])
    if implementation in KERNELS:
        gone = jnp.where(here, EMPTY, pos)
        found, _ = attention.attend(*arguments((q, *spoilt, gone, *rest)), spec)
        want, _ = by_hand(*numbers[:3], gone, *rest)
        np.testing.assert_allclose(attention.normalize(found), want, atol=1e-5)


def test_codes_that_kernels_know():
    """Others are decoded before a kernel runs."""
    for name in CODECS:
        (_, k, v, *_), _ = of(name, 1)
        bare = [attention.stored.unturned(x)[0] for x in (k, v)]
        assert all(x.codes is not None for x in bare) == (name in READ_AS_CODES)


@pytest.mark.parametrize("stats", [frozenset(), STATS], ids=["plain", "scored"])
@pytest.mark.parametrize("length", [1, 64])
def test_no_decoded_copy_of_a_layer(stats, length):
    """A CPU's program needs less than half of one beyond what numbers take."""
    rows, slots = 32, 1024
    q, k = jnp.zeros((rows, 2, 3, length, 64)), jnp.zeros((rows, 2, slots, 64))
    pos, q_pos = jnp.zeros((rows, 2, slots), jnp.int32), jnp.zeros((rows, length), int)
    queries = Queries(q, q_pos, jnp.ones((rows,), jnp.int32))
    run, spec = jax.jit(attention.attend), AttentionSpec(stats, "tiles")

    def temporary(k, v):
        program = run.lower(queries, Pairs(k, v, pos), spec).compile()
        return program.memory_analysis().temp_size_in_bytes

    more = temporary(*stored(codecs.int8(), k, k)) - temporary(k, k)
    assert more < k.nbytes / 2


@pytest.mark.kernels
@pytest.mark.parametrize("depth", often([64, 128], [64]))
@pytest.mark.parametrize("name", often(sorted(READ_AS_CODES), ["k8v4"], "e2e"))
def test_fused_write(name, depth):
    """Codes and scales lie where the layout's own write puts them, bit for bit."""
    codec = CODECS[name]
    q, k, v, pos, q_pos, n = finite(draw(5, 2, 3, 1, 256, depth))
    layer = dense.DenseLayer(
        codec.key.encode(k), codec.value.encode(v), pos, None, codec, "float32"
    )
    new = jax.random.normal(jax.random.key(5), (2, 2, 2, 1, depth))
    slots = jnp.array([[3, 255], [256, 0]], jnp.int32)[..., None]
    hit = jnp.arange(256, dtype=jnp.int32)[None, None] == slots
    layer = layer.replace(positions=jnp.where(hit, q_pos[:, :, None], pos))
    queries, spec = Queries(q, q_pos, n), AttentionSpec(STATS, KERNEL)
    found, partial, seen = jax.jit(dense.write_attend)(
        layer, queries, *new, slots, spec
    )
    wrote = jax.jit(dense.write)(layer, *new, slots, q_pos)
    jax.tree.map(np.testing.assert_array_equal, found, wrote)
    out, expected = by_hand(
        q, dense.keys(wrote), dense.values(wrote), found.positions, q_pos, n
    )
    allowed = TOLERANCE["float32"]
    np.testing.assert_allclose(attention.normalize(partial), out, atol=1e-5)
    for stat in STATS:
        np.testing.assert_allclose(
            getattr(seen, stat), expected[stat], atol=allowed["stats"]
        )


@pytest.mark.kernels
@pytest.mark.e2e
@pytest.mark.parametrize(
    "name", often(["int8", "int4_rotated", "k8v4", "fp8"], ["int4_rotated", "k8v4"])
)
def test_generates_what_the_reference_does(name):
    """The same tokens and kept pairs, prompts and decoding, by codes and decoded."""
    model, policy = tiny_model(head_dim=128), policies.average_attention()
    runs = [
        generated(model, policy, "prefill_and_decode", how, codec=CODECS[name])
        for how in ("reference", KERNEL)
    ]
    (a, kept_a, logits_a), (b, kept_b, logits_b) = runs
    np.testing.assert_array_equal(a, b)
    jax.tree.map(np.testing.assert_array_equal, kept_a, kept_b)
    np.testing.assert_allclose(logits_a, logits_b, atol=1e-4)
