"""What comes back of stored bits: the formulas' values, as exact as bits allow."""

import functools
import pathlib
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often
from testing import stored_bits

from kvjax import UserError
from kvjax.cache import codecs
from kvjax.cache.codecs import rotation, uniform

SHAPE = (2, 3, 700, 64)  # of all tests, so that a codec is compiled once
ALL = [name for name in codecs.names() if "toy" not in name]
NAMES = [name for name in ALL if name != "kivi"]  # whose groups are of tokens
COARSE = {"int2", "int2_rotated", "int4_rotated", "rotated"}  # of the largest floats
OFTEN = ("int8", "int4", "int2", "outliers", "fp8")


@functools.partial(jax.jit, static_argnums=0)
def run(tensor, x):
    stored = tensor.encode(x)
    return stored, tensor.decode(stored, x.dtype)


def both_ways(tensor, x):
    """What is stored, and what comes back in the dtype of x."""
    stored, back = run(tensor, jnp.asarray(x))
    like = jax.eval_shape(lambda: tensor.init(x.shape, x.dtype))
    told = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert told(stored) == told(like)
    assert all(leaf.shape[:3] == x.shape[:3] for leaf in jax.tree.leaves(stored))
    return stored, np.asarray(back.astype(jnp.float32))


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


symmetric, centred = (
    lambda bits, rule=rule: functools.partial(rule, bits=bits)
    for rule in (stored_bits.symmetric, stored_bits.centred)
)
CASES = {  # a codec, and its transcription
    "int8": (codecs.int8(), symmetric(8), None),
    "int8 of 32": (codecs.int8(32), symmetric(8), 32),
    "int8 centred": (codecs.int8(16, symmetric=False), centred(8), 16),
    "int4": (codecs.int4(), symmetric(4), 32),
    "int4 of 16": (codecs.int4(16), symmetric(4), 16),
    "int4 of 64": (codecs.int4(64), symmetric(4), 64),
    "int4 centred": (codecs.int4(symmetric=False), centred(4), 32),
    "int2": (codecs.int2(), centred(2), 32),
    "int2 symmetric": (codecs.int2(64, symmetric=True), symmetric(2), 64),
    "outliers": (
        codecs.int4_outliers(),
        functools.partial(stored_bits.with_outliers, bits=4, count=1),
        32,
    ),
    "3 outliers": (
        codecs.int4_outliers(3, 64),
        functools.partial(stored_bits.with_outliers, bits=4, count=3),
        64,
    ),
    "fp8": (codecs.fp8(), stored_bits.float8, None),
}
GRIDS = [name for name in CASES if name not in ("outliers", "3 outliers", "fp8")]


@pytest.mark.parametrize("name", often(CASES, OFTEN, "e2e"))
def test_as_transcribed(name):
    """But for what one rounding of XLA's own moves over the edge of a code."""
    codec, rule, group = CASES[name]
    x = gaussian(*SHAPE) * np.exp(gaussian(*SHAPE[:3], 1, seed=1))
    _, back = both_ways(codec.key, x)
    expected = stored_bits.by_groups(rule, group)(x)
    other = ~np.isclose(back, expected, rtol=1e-5, atol=1e-7)
    assert np.mean(other) < 5e-4
    assert codec.key is codec.value


def half_steps(stored: uniform.Codes, shape):
    """[B, K, C, D], half of the step of each value's group."""
    half = np.asarray(stored.scale.astype(jnp.float32)) / 2
    return np.repeat(half, shape[-1] // half.shape[-1], axis=-1)


@pytest.mark.parametrize("name", often(GRIDS, OFTEN[:3], "e2e"))
def test_at_most_half_a_step(name):
    codec, _, _ = CASES[name]
    x = gaussian(*SHAPE, seed=2) + gaussian(*SHAPE[:3], 1, seed=3)
    stored, back = both_ways(codec.key, x)
    within = half_steps(stored, x.shape) + 1e-6 * np.abs(x)
    assert np.all(np.abs(back - x) <= within)


@pytest.mark.e2e
@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(
    bits=st.sampled_from([8, 4, 2]),
    symmetric=st.booleans(),
    depth=st.sampled_from([(8, 4), (48, 16), (80, None), (96, 32), (96, 96)]),
    shape=st.tuples(*[st.integers(1, 3)] * 3),
    spread=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    seed=st.integers(0, 1000),
)
def test_half_a_step_of_any_shape(bits, symmetric, depth, shape, spread, seed):
    depth, group = depth
    x = (gaussian(*shape, depth, seed=seed) + 1) * np.float32(spread)
    stored, back = both_ways(uniform.of_bits(bits, group, symmetric), x)
    assert np.all(np.abs(back - x) <= half_steps(stored, x.shape) + 1e-6 * np.abs(x))
    assert stored.codes.nbytes * 8 == x.size * bits


def test_float8_to_a_sixteenth():
    x = gaussian(*SHAPE)
    stored, back = both_ways(codecs.fp8().key, x)
    scale = np.asarray(stored.scale.astype(jnp.float32))
    assert np.all(np.abs(back - x) <= np.maximum(np.abs(x) / 16, scale / 2**10) * 1.001)


def test_outliers_are_there_to_16_bits():
    x = gaussian(*SHAPE)
    x[..., 5], x[..., 40] = 60.0, -70.0
    _, back = both_ways(codecs.int4_outliers().key, x)
    np.testing.assert_array_equal(back[..., [5, 40]], x[..., [5, 40]])
    rest = np.delete(back - x, [5, 40], axis=-1)
    assert np.abs(rest).max() < 0.5  # where int4's step is 10
    _, without = both_ways(codecs.int4().key, x)
    assert np.abs(without - x).max() > 2


def expected_errors():
    even = {bits: stored_bits.even_levels(bits) for bits in (8, 4, 2)}
    error = stored_bits.error_symmetric
    return {
        "int8": lambda: error(even[8], 64),
        "int8 of 32": lambda: error(even[8], 32),
        "int4": lambda: error(even[4], 32),
        "int4 of 16": lambda: error(even[4], 16),
        "int4 of 64": lambda: error(even[4], 64),
        "int4 centred": lambda: stored_bits.error_centred(4, 32),
        "int2": lambda: stored_bits.error_centred(2, 32),
        "int2 symmetric": lambda: error(even[2], 64),
        "outliers": lambda: error(even[4], 32, 1),
        "3 outliers": lambda: error(even[4], 64, 3),
        "fp8": lambda: error(stored_bits.float8_levels(), 64),
    }


@pytest.mark.parametrize("name", often(expected_errors(), OFTEN, "e2e"))
def test_errors_of_gaussian_values(name):
    x = gaussian(*SHAPE)
    expected = expected_errors()[name]()
    tensors = [CASES[name][0].key]
    if name in ("int4", "int2"):  # Gaussian values are so however they are turned
        tensors += [rotation.rotated(CASES[name][0]).key]
    for tensor in tensors:
        _, back = both_ways(tensor, x)
        assert np.mean((back - x) ** 2) == pytest.approx(expected, rel=0.05)


DTYPES = ("float32", "bfloat16", "float16")
SPECIAL = often(
    [(name, dtype) for name in NAMES for dtype in DTYPES],
    [
        (name, "float32")
        for name in ("int8", "int2", "int4_outliers", "fp8", "int4_rotated")
    ],
    "e2e",
    several=True,
)


def special(dtype):
    """Rows of zeros, subnormals and the largest; then of what is no number."""
    info = jnp.finfo(dtype)
    least, most = float(info.smallest_subnormal), float(info.max)
    x = gaussian(*SHAPE)
    rows = x[0, 0]
    rows[:5] = 0
    rows[1] = least * np.arange(SHAPE[-1])
    rows[2] = most
    rows[3, 7:9] = most, -most
    rows[4] = np.where(rows[5] > 0, most, -most)
    rows[6, 3], rows[7, 33], rows[8, 34] = np.nan, np.inf, -np.inf
    return jnp.asarray(x).astype(dtype)


@pytest.mark.parametrize(("name", "dtype"), SPECIAL)
def test_special_values(name, dtype):
    """What is no number comes back as none, and nothing finite as infinite."""
    x = special(dtype)
    most = float(jnp.finfo(dtype).max)
    given = np.asarray(x.astype(jnp.float32))[0, 0]
    for tensor in set(codecs.make(name)[1:3]):
        rows = both_ways(tensor, x)[1][0, 0]
        np.testing.assert_array_equal(rows[0], 0)
        assert np.abs(rows[1]).max() <= np.abs(given[1]).max() * 3
        assert np.all(np.isfinite(rows[:6]))
        if name not in COARSE:
            assert np.abs(rows[2:5] - given[2:5]).max() <= most / 14 * 1.01
        assert not np.any(np.isfinite(rows[~np.isfinite(given)]))
        there = np.isfinite(rows[6:])
        assert np.all(there[3:])  # other tokens are none of theirs
        assert np.abs(rows[6:][there] - given[6:][there]).max() < 2.5


@pytest.mark.parametrize(
    ("codec", "at_64", "at_128"),
    [
        ("identity", 64 * 4 * 2, 128 * 4 * 2),
        ("int8", (64 + 2) * 2, (128 + 2) * 2),
        (codecs.int8(32), (64 + 2 * 2) * 2, (128 + 4 * 2) * 2),
        ("int4", (32 + 2 * 2) * 2, (64 + 4 * 2) * 2),
        (codecs.int4(symmetric=False), (32 + 2 * 4) * 2, (64 + 4 * 4) * 2),
        ("int4_rotated", 72, 144),
        ("int4_outliers", (32 + 2 * 2 + 2 * 3) * 2, (64 + 4 * 2 + 4 * 3) * 2),
        ("int2", (16 + 2 * 4) * 2, (32 + 4 * 4) * 2),
        (codecs.int2(symmetric=True), (16 + 2 * 2) * 2, (32 + 4 * 2) * 2),
        ("int2_rotated", 48, 96),
        ("fp8", (64 + 2) * 2, (128 + 2) * 2),
        ("k8v4", 66 + 36, 130 + 72),
        (codecs.pair(codecs.int8(32), "int4"), 104, 136 + 72),
    ],
)
def test_bytes_by_hand(codec, at_64, at_128):
    codec = codecs.make(codec)
    assert codecs.pair_bytes(codec, 64, "float32") == at_64
    assert codecs.pair_bytes(codec, 128, "float32") == at_128


def test_the_page_lists_them_with_their_bytes():
    page = (pathlib.Path(__file__).parents[3] / "docs" / "codecs.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    for name, *told in rows:
        codec = codecs.make(name)
        assert [codecs.pair_bytes(codec, d, "float32") for d in (64, 128)] == [
            int(each) for each in told
        ]
    of_others = {"after_prompt", "by_layer", "pair", "rotated"}
    assert {name for name, *_ in rows} == {*ALL} - {"identity"} - of_others


def test_pairs():
    mixed = codecs.make("pair", key="fp8", value="int2", residual_length=8)
    assert mixed.key is codecs.fp8().key and mixed.value is codecs.int2().value
    assert mixed.residual_length == 8
    assert mixed == codecs.pair("fp8", codecs.int2(), 8)  # one program for both
    wide = codecs.make("k8v4")
    assert (wide.key, wide.value) == (codecs.int8().key, codecs.int4().value)
    assert codecs.make("rotated", codec="int2") == codecs.make("int2_rotated")


def test_packing():
    for bits in (8, 4, 2):
        half = 2 ** (bits - 1)
        codes = np.random.default_rng(0).integers(-half, half, (1, 1, 3, 16), np.int8)
        packed = uniform.pack(jnp.asarray(codes), bits)
        assert packed.nbytes * 8 == codes.size * bits
        found = jnp.concatenate(uniform.unpack(packed, bits), axis=-1)
        np.testing.assert_array_equal(found, codes)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("int4", {"group": 0}, r"group 0: must be at least 1"),
        ("int4", {"group": "32"}, r"group is '32': give a whole number"),
        ("int4", {"group": [32]}, r"group is \[32\]: give a whole number"),
        ("int2", {"symmetric": 1}, r"symmetric is 1: give True or False"),
        ("int8", {"size": 3}, r"codec 'int8': .*'size'"),
        ("int4_outliers", {"outliers": 32}, r"outliers 32 of a group of 32 .*fewer"),
        ("int4_outliers", {"outliers": 0}, r"outliers 0: must be at least 1"),
        ("int4_outliers", {"group": 512}, r"group 512: must be at most 256"),
        ("pair", {"key": "int5"}, r"codec 'int5' is unknown"),
        ("pair", {"value": 5}, r"codec 5 is no"),
        ("pair", {"residual_length": -1}, r"residual_length -1: must be at least 0"),
    ],
)
def test_refused(name, options, words):
    with pytest.raises(UserError, match=words):
        codecs.make(name, **options)


@pytest.mark.parametrize(
    ("codec", "head_dim", "words"),
    [
        (
            "int4",
            48,
            r"codec 'int4': int4 in groups of 32 .* of 48: use group=16",
        ),
        ("int4_outliers", 80, r"int4 in groups of 32 .* 80: use group=16"),
        (codecs.int2(3), 6, r"int2 packs 4 values a byte, .* head_dim of 6 .*int8"),
        ("int4_rotated", 72, r"no rotation for a head_dim of 72: .*12 or 20"),
        ("k8v4", 24, r"group=8"),
    ],
)
def test_refused_for_a_model(codec, head_dim, words):
    with pytest.raises(UserError, match=words):
        codecs.check(codecs.make(codec), head_dim)


def test_functions_that_do_not_go_together():
    half = codecs.TensorCodec(
        "half",
        init=lambda shape, dtype: jnp.zeros(shape, jnp.bfloat16),
        encode=lambda x: x.astype(jnp.float16),
        decode=lambda stored, dtype: stored.astype(dtype),
    )
    words = r"'mine': half: encode gives float16.*has to give bfloat16"
    with pytest.raises(UserError, match=words):
        codecs.check(codecs.Codec("mine", half, half), 8)
    double = half._replace(encode=lambda x: x.astype(jnp.bfloat16))
    double = double._replace(decode=lambda stored, dtype: stored)
    with pytest.raises(UserError, match=r"'mine': half: decode gives bfloat16"):
        codecs.check(codecs.Codec("mine", codecs.plain, double), 8)
