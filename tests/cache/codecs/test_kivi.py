"""Keys in groups of tokens: the formula, when groups are made, and what cannot be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_spec
from testing import layer, stored_bits
from testing.engine import run_batch

import kvjax
from kvjax import Schedule, UserError, cache
from kvjax.cache import codecs, layouts
from kvjax.engine import layerwise, runner
from kvjax.engine.jobs import Job, bucket
from kvjax.parallel import meshes

B, K, C, D = 3, 2, 61, 8  # slots fill no whole number of groups
LAYOUT = layouts.DEFAULT
PROMPTS = [
    np.random.default_rng(i).integers(0, 50, n).tolist()
    for i, n in enumerate((61, 16, 80))
]


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_channel(keys, bits, group):
    """[..., T, D], every channel of `group` tokens on its own grid."""
    rule = functools.partial(stored_bits.centred, bits=bits)
    turned = np.ascontiguousarray(np.swapaxes(keys, -1, -2))
    return np.swapaxes(stored_bits.by_groups(rule, group)(turned), -1, -2)


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (2, 4), (4, 32), (8, 16)])
def test_as_transcribed(bits, group):
    """Keys by channel, values by token, but for what one rounding moves."""
    codec = codecs.kivi(bits, group)
    x = gaussian(2, 3, 5 * group, 64) * np.exp(gaussian(64, seed=1))
    told = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    for tensor, expected in (
        (codec.key, by_channel(x, bits, group)),
        (codec.value, stored_bits.by_groups(centred(bits), group)(x)),
    ):
        stored = jax.jit(tensor.encode)(x)
        like = jax.eval_shape(lambda t=tensor: t.init(x.shape, jnp.dtype("float32")))
        assert told(stored) == told(like)
        found = back(tensor, x)
        assert np.mean(~np.isclose(found, expected, rtol=1e-5, atol=1e-6)) < 5e-4


def centred(bits):
    return functools.partial(stored_bits.centred, bits=bits)


def back(tensor, x):
    """What comes back of what is stored."""
    stored = jax.jit(tensor.encode)(jnp.asarray(x))
    return np.asarray(tensor.decode(stored, jnp.dtype("float32")))


def test_bytes_by_hand():
    """Of a group of 32 tokens, every channel has 8 bytes of codes and 4 of grid."""
    assert codecs.pair_bytes(codecs.kivi(), 64, "float32") == 64 * 12 / 32 + 16 + 2 * 4
    assert codecs.pair_bytes(codecs.kivi(4), 128, "float32") == 128 * 20 / 32 + 64 + 16


def test_a_channel_that_is_large_costs_the_others_nothing():
    keys = gaussian(1, 1, 64, 64)
    keys[..., 5] += 50
    each = codecs.kivi(), codecs.int2()
    error = {codec.name: back(codec.key, keys) - keys for codec in each}
    others = np.arange(64) != 5
    rms = {name: np.sqrt(np.mean(e[..., others] ** 2)) for name, e in error.items()}
    assert rms["kivi"] < 0.5 < rms["int2"] / 2


def test_what_is_no_number_says_so_in_its_channel():
    keys = gaussian(1, 1, 8, D)
    keys[0, 0, 2, 3] = np.inf
    lost = np.zeros((1, 1, 8, D), bool)
    lost[:, :, :4, 3] = True
    found = back(codecs.kivi(8, 4).key, keys)
    np.testing.assert_array_equal(np.isnan(found), lost)


# --- slots ----------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=3)
def append(layer, k, n, length):
    """`length` new tokens, of which n of every row are real."""
    at = jnp.sum(layer.positions[:, 0] >= 0, axis=1, dtype=jnp.int32)[:, None]
    positions = at + jnp.arange(length, dtype=jnp.int32)[None]
    layer, _, slots, overflow = LAYOUT.claim(layer, (), positions, n)
    return LAYOUT.write(layer, k, -k, slots, positions), overflow


def filled(codec, pieces, lengths):
    """A layer that was given tokens in pieces, rows ragged; and the tokens."""
    spec = tiny_spec(num_kv_heads=K, head_dim=D)
    layer = LAYOUT.init(spec, B, C, codec, jnp.dtype("float32"))
    tokens, start = gaussian(B, K, C, D, seed=7), 0
    for piece in pieces:
        real = np.clip(np.array(lengths) - start, 0, piece).astype(np.int32)
        new = np.full((B, K, piece, D), np.nan, np.float32)  # padding may be anything
        for row, count in enumerate(real):
            new[row, :, :count] = tokens[row, :, start : start + count]
        layer, overflow = append(layer, new, real, piece)
        assert not overflow.any()
        start += piece
    return layer, tokens


LENGTHS = 57, 9, 0
PIECES = {
    "at once": (57,),
    "blocks": (16, 16, 16, 9),
    "one by one": (1,) * 57,
    "odd": (5, 1, 1, 30, 2, 18),
}


@pytest.mark.parametrize("name", often(PIECES, ["odd"], "e2e"))
@pytest.mark.parametrize("newest", [4, 10, 16])
def test_groups_are_made_when_they_are_whole(name, newest):
    codec = codecs.kivi(2, 4, residual_length=newest)
    layer, tokens = filled(codec, PIECES[name], LENGTHS)
    k, v = (np.asarray(read(layer)) for read in (LAYOUT.keys, LAYOUT.values))
    coarse = by_channel(np.pad(tokens, [(0, 0)] * 2 + [(0, 3), (0, 0)]), 2, 4)
    for row, length in enumerate(LENGTHS):
        old = max(length - newest, 0)
        np.testing.assert_allclose(k[row, :, :old], coarse[row, :, :old], atol=1e-5)
        fresh = tokens[row, :, old:length]
        np.testing.assert_array_equal(k[row, :, old:length], fresh)
        np.testing.assert_array_equal(v[row, :, old:length], -fresh)


# --- models ---------------------------------------------------------------------------


def job_of(spec, codec, policy=None, budget=None, schedule=None, batch=3):
    config = cache.make_spec(spec, policy, budget, schedule, codec=codec)
    return Job(spec, config, batch, bucket(spec, config, 80, 9), 9)


AFTER = Schedule("after_prefill", prefill_chunk=8)
ONLY = Schedule("prefill_only", prefill_chunk=8, evict_size=8)
KIVI = codecs.kivi(2, 8, residual_length=12)
BARE = KIVI._replace(residual_length=0)
WAYS = {
    "full": (KIVI, None, None, Schedule("none", prefill_chunk=8)),
    "full, later": (codecs.after_prompt(KIVI),),
    "kept": (codecs.after_prompt(KIVI), "key_diff", 24, AFTER),
    "heads apart": (codecs.after_prompt(KIVI), "key_diff", ((16, 40), (32, 24)), ONLY),
}


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.e2e
@pytest.mark.parametrize("way", WAYS)
def test_alone_in_pools_and_layer_by_layer_as_in_a_batch(tiny, way):
    job = job_of(tiny.spec, *WAYS[way])
    together = run_batch(tiny.params, job, PROMPTS, range(3))
    found = cache.kept_positions(together.state)
    one = dataclasses.replace(job, batch=1)
    alone = run_batch(tiny.params, one, PROMPTS[2:], [2])
    assert alone.tokens[0] == together.tokens[2]
    same(cache.kept_positions(alone.state)[0], found[2])
    pooled = dataclasses.replace(job, prefill_batch=2)
    staggered = run_batch(tiny.params, pooled, PROMPTS, range(3))
    assert staggered.tokens == together.tokens
    apart = runner.run_batch(layerwise.LayerByLayer(tiny, job), PROMPTS, range(3))
    assert apart.tokens == together.tokens
    same(cache.kept_positions(apart.state), found)


@pytest.mark.e2e
@pytest.mark.parametrize("way", ["full", "kept"])
@pytest.mark.parametrize(
    "asked", often(["data:4,model:2", "data:8,model:1"], ["data:4,model:2"])
)
def test_over_a_mesh_as_on_one_device(way, asked):
    spec = tiny_spec(num_layers=1, num_kv_heads=2, num_heads=4)
    config = job_of(spec, *WAYS[way]).config
    data = layer.random_data(spec, 8, 60, 0)
    lengths = np.array([48, 0, 29, 24, 48, 7, 30, 1])
    kept, end = layer.run(spec, config, data, lengths, 48)
    over = meshes.mesh(asked, spec.num_kv_heads)
    also_kept, also = layer.run(spec, config, data, lengths, 48, over)
    same(also_kept, kept)
    for read in (LAYOUT.keys, LAYOUT.values):
        live = lambda x, read=read: np.where(x.positions[..., None] >= 0, read(x), 0)
        found, wanted = (live(x.layers[0]) for x in (also, end))
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.e2e
def test_many_bits_are_the_full_cache(tiny):
    """With 8 bits and groups of 8 the tokens are those of numbers."""
    how = {"max_new_tokens": 9, "memory_gb": 0.1}
    plain = kvjax.generate(tiny, PROMPTS, **how)
    coded = kvjax.generate(tiny, PROMPTS, codec=codecs.kivi(8, 8, 8), **how)
    assert [each.tokens for each in coded] == [each.tokens for each in plain]


# --- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 3}, r"bits 3: use 2, 4 or 8"),
        ({"group": 1}, r"group 1: must be at least 2"),
        ({"group": 6}, r"packs 4 tokens a byte, .* group of 6 .*multiple of 4"),
        ({"residual_length": 31}, r"residual_length 31: must be at least 32"),
    ],
)
def test_refused(options, words):
    with pytest.raises(UserError, match=words):
        codecs.make("kivi", **options)


@pytest.mark.parametrize(
    ("codec", "budget", "schedule", "words"),
    [
        (KIVI, 24, Schedule(prefill_chunk=8), r"8 keys together.*evicts single pairs"),
        (KIVI, 24, AFTER, r"'after_prefill': take after_prompt\('kivi'\)"),
        (
            codecs.after_prompt(KIVI),
            24,
            Schedule("decode_only", prefill_chunk=8),
            r"'decode_only'.*int2",
        ),
        (codecs.by_layer("int8", KIVI), 24, AFTER, r"'kivi' encodes 8 keys together"),
        (codecs.after_prompt(codecs.by_layer("int8", KIVI)), 10, AFTER, r"newest 12"),
        (codecs.after_prompt(KIVI), 10, AFTER, r"newest 12 pairs .*a head keeps 10"),
        (codecs.pair(BARE, "int8"), None, None, r"residual_length of 8 at least"),
        (codecs.pair("int8", BARE._replace(value=KIVI.key)), None, None, "one by one"),
        (codecs.pair(BARE, codecs.int8(), 8, sinks=4), None, None, r"no sinks, got 8"),
    ],
)
def test_refused_with(codec, budget, schedule, words):
    with pytest.raises(UserError, match=words):
        policy = None if budget is None else "key_diff"
        cache.make_spec(tiny_spec(), policy, budget, schedule, codec=codec)


def test_windows_drop_single_pairs():
    for codec in (KIVI, codecs.by_layer("int8", KIVI)):
        with pytest.raises(UserError, match=r"sliding windows: use int2"):
            spec = tiny_spec(sliding_windows=(16, 0))
            cache.make_spec(spec, None, None, codec=codec)
