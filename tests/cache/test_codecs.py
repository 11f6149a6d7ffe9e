"""Codecs: what comes back is what the codec says, exactly, and bytes are counted so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_spec
from testing import layer, toys

import kvjax
from kvjax import Schedule, UserError, cache, policies
from kvjax.cache import codecs
from kvjax.engine.footprint import state_bytes
from kvjax.engine.jobs import Job, bucket

SPEC = layer.spec_of(heads=2, group=3, depth=8)
LENGTHS, PROMPT, NEW = (5, 48, 33), 48, 20
BUDGET, BLOCK = 32, 8


def rounded(x):
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))


def run(codec, data, phases="prefill_and_decode", policy=None):
    schedule = Schedule(phases, BLOCK, BLOCK)
    policy = policy or policies.average_attention()
    config = cache.make_spec(SPEC, policy, BUDGET, schedule, codec=codec)
    return layer.run(SPEC, config, data, LENGTHS, PROMPT).end


@pytest.mark.parametrize("phases", ["prefill_and_decode", "after_prefill"])
def test_exact_where_nothing_is_lost(phases):
    """Pairs that bfloat16 holds exactly: the same state as with no codec."""
    data = layer.random_data(SPEC, 3, PROMPT + NEW, seed=3)
    data = data._replace(k=rounded(data.k), v=rounded(data.v))
    turned = policies.streaming()  # attention's sums may differ where rope rounds
    plain, half = (run(c, data, phases, turned) for c in ("identity", toys.HALVED))
    jax.tree.map(
        np.testing.assert_array_equal,
        cache.kept_positions(plain),
        cache.kept_positions(half),
    )
    values = [state.layout.values(state.layers[0]) for state in (plain, half)]
    np.testing.assert_array_equal(*values)
    keys = [state.layout.keys(state.layers[0]) for state in (plain, half)]
    np.testing.assert_array_equal(rounded(keys[0]), keys[1])


@pytest.mark.parametrize("phases", ["prefill_and_decode", "after_prefill"])
def test_first_and_newest_pairs_stay_as_they_were(phases):
    data = layer.random_data(SPEC, 3, PROMPT + NEW, seed=4)
    state = run(toys.HALVED_BUT_ENDS, data, phases)
    positions = np.asarray(state.layout.positions(state.layers[0]))
    values = np.asarray(state.layout.values(state.layers[0]))
    newest = toys.HALVED_BUT_ENDS.residual_length
    seen = {"raw": 0, "rounded": 0}
    for row, length in enumerate(LENGTHS):
        text = np.concatenate(
            [data.v[row, :, :length], data.v[row, :, PROMPT:]], axis=1
        )
        now = length + NEW - 1
        for head in range(SPEC.num_kv_heads):
            for slot in np.flatnonzero(positions[row, head] >= 0):
                at = positions[row, head, slot]
                raw = at > now - newest or at < toys.HALVED_BUT_ENDS.sinks
                expected = text[head, at] if raw else rounded(text[head, at])
                np.testing.assert_array_equal(values[row, head, slot], expected)
                seen["raw" if raw else "rounded"] += 1
    assert min(seen.values()) > 20


def test_bytes_are_those_of_what_is_stored(tiny):
    assert codecs.pair_bytes(codecs.identity, 8, "float32") == 2 * 8 * 4
    assert codecs.pair_bytes(toys.HALVED, 8, "float32") == 2 * 8 * 2
    sizes = {}
    for codec in (codecs.identity, toys.HALVED):
        config = cache.make_spec(
            tiny.spec,
            policies.streaming(),
            64,
            Schedule(prefill_chunk=16, evict_size=16),
            codec=codec,
        )
        job = Job(tiny.spec, config, 4, bucket(tiny.spec, config, 100, 8), 8)
        sizes[codec.name] = state_bytes(job)["decode"]
    pairs = 4 * 64 * tiny.spec.num_kv_heads * tiny.spec.num_layers
    assert sizes["identity"] - sizes["halved"] == pairs * 2 * tiny.spec.head_dim * 2


def test_generates_with_a_registered_codec(tiny):
    """By name, through `kvjax.generate`, which encodes by it."""
    encoded = []

    def encode(x):
        encoded.append(x.shape)
        return toys.ROUNDED.encode(x)

    noted = toys.ROUNDED._replace(encode=encode)
    codecs.register("toy_halved", lambda: codecs.Codec("noted", noted, noted))
    options = {"policy": policies.key_diff(), "budget": 24, "max_new_tokens": 8}
    options["schedule"] = Schedule(prefill_chunk=8, evict_size=8)
    prompt = [list(range(1, 45))]
    (named,) = kvjax.generate(tiny, prompt, codec="toy_halved", **options)
    assert {shape[-1] for shape in encoded} == {tiny.spec.head_dim}
    (given,) = kvjax.generate(tiny, prompt, codec=toys.HALVED, **options)
    assert named.tokens == given.tokens and len(named.tokens) == 8


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("int3", r"codec 'int3' is unknown: .*identity.*module:function"),
        ("nowhere:none", r"codec 'nowhere:none'.*nowhere"),
        ("math:nothing", r"codec 'math:nothing'.*nothing"),
        ("math:floor", r"codec 'math:floor'"),
        (7, r"codec 7 is no"),
        (toys.HALVED._replace(residual_length=-1), r"residual_length"),
        (
            codecs.Codec("grouped", toys.ROUNDED._replace(group_size=32), toys.ROUNDED),
            r"'grouped' encodes 32 keys together .*residual_length of 32 at least",
        ),
    ],
)
def test_refused(codec, words):
    with pytest.raises(UserError, match=words):
        cache.make_spec(tiny_spec(), policies.recency(), 128, codec=codec)
