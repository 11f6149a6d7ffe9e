"""Every formula against numbers worked out by hand from the models' config.json."""

import math

import numpy as np
import pytest

from kvjax.cache.offload import Offload
from kvjax.cache.spec import make_spec
from kvjax.evaluation import arithmetic, roofline
from kvjax.evaluation.arithmetic import Link
from kvjax.models import presets
from kvjax.types import UserError

SMALL, LARGE, HUGE, WINDOWED = (
    presets.spec(name)
    for name in ("llama-3-8b", "llama-3-70b", "llama-3.1-405b", "mistral-7b")
)
A100 = roofline.device("a100-80gb").rates
# Of Llama-3-8B: projections of queries and output, of keys and values, three of the
# feed-forward network, over 32 layers; the head; and two norms of every layer.
MATRICES = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
HEAD, NORMS = 128_256 * 4096, 32 * 2 * 4096


@pytest.mark.parametrize(
    ("spec", "batch", "gib"), [(SMALL, 32, 16), (LARGE, 64, 80), (HUGE, 32, 63)]
)
def test_published_bytes(spec, batch, gib):
    """4,096 tokens each, in 16 bits."""
    assert arithmetic.kv_bytes(spec, batch, 4096) == gib * 2**30


@pytest.mark.parametrize("name", presets.CONFIGS)
@pytest.mark.parametrize(("dtype", "bits"), [("float32", 32), ("bfloat16", 16)])
def test_a_token_is_a_slot_of_the_state(name, dtype, bits):
    """What one token more adds to the arrays, but for 4 bytes of position per head."""
    spec = presets.spec(name)
    one, two = (arithmetic.row_bytes(spec, slots, None, dtype) for slots in (1, 2))
    positions = 4 * spec.num_layers * spec.num_kv_heads
    assert arithmetic.kv_bytes(spec, 1, 1, bits) == two - one - positions


def test_a_window_that_rolls():
    assert arithmetic.kv_bytes(WINDOWED, 1, 32_768) == 4 * 2**30
    assert arithmetic.kv_bytes(WINDOWED, 1, 32_768, rolling=True) == 0.5 * 2**30
    assert arithmetic.kv_bytes(SMALL, 1, 32_768, rolling=True) == 4 * 2**30


def test_bits_with_scales():
    """16 of scale and 16 of zero for 64 numbers are half a bit each."""
    assert arithmetic.stored_bits(4) == 4 and arithmetic.stored_bits(4, 64) == 4.5


def test_a_step_by_hand():
    one = arithmetic.decode_step(SMALL, 32, 4096)
    assert one.weights.bytes == 2 * (MATRICES + NORMS + HEAD)
    assert one.weights.flops == 2 * 32 * (MATRICES + HEAD)
    assert one.pairs.bytes == 32 * 4097 * 2**17  # 4,096 are read and one is written
    assert one.pairs.flops == 4 * 32 * 32 * 4096 * 32 * 128
    share = 32 * 4097 * 2**17 / (one.weights.bytes + 32 * 4097 * 2**17)
    assert one.share_of_pairs == pytest.approx(share) == pytest.approx(0.534, abs=1e-3)
    assert one.seconds(A100) == pytest.approx(one.work.bytes / 2.039e12)
    assert one.waits_for(A100) == "bytes"


def test_a_step_that_waits_for_its_flops():
    """256 rows are 256 FLOPs per byte of 16-bit weights; an A100 does 153."""
    one = arithmetic.decode_step(SMALL, 256, 1)
    assert one.waits_for(A100) == "FLOPs"
    assert one.seconds(A100) == pytest.approx(one.work.flops / 312e12)
    assert arithmetic.decode_step(SMALL, 128, 1).waits_for(A100) == "bytes"


def test_gain_by_hand():
    """Half the bytes of pairs, at a length where these are those of the weights."""
    weights, pairs = 2 * (MATRICES + NORMS + HEAD), 8 * 8193 * 2**17
    wanted = (weights + pairs) / (weights + pairs / 2)
    assert arithmetic.gain(SMALL, 8, 8192, 8) == pytest.approx(wanted)
    assert arithmetic.gain(SMALL, 8, 8192, 8, A100) == pytest.approx(wanted)
    assert arithmetic.gain(SMALL, 256, 16, 8, A100) == 1.0  # FLOPs, as before


def test_lengths_are_seeded_and_in_range():
    for kind, mean in (("uniform", 2048), ("lognormal", 512 * math.exp(0.5))):
        drawn = arithmetic.draw_lengths(kind, 20_000, 4096, 3)
        assert drawn.min() >= 1 and drawn.max() <= 4096
        assert drawn.mean() == pytest.approx(mean, rel=0.06)  # cut off at both ends
        again, other = (arithmetic.draw_lengths(kind, 20_000, 4096, s) for s in (3, 4))
        assert (drawn == again).all() and (drawn != other).any()


def test_pages_by_hand():
    """Pages of 16: 1, 1 and 3 of them for 3, 16 and 33 tokens; 13, 0 and 15 empty."""
    lengths = np.array([3, 16, 33])
    assert arithmetic.contiguous_waste(lengths, 64) == pytest.approx(1 - 52 / 192)
    cost = arithmetic.paging(lengths, 16, 100.0)
    assert cost.empty == pytest.approx(28 / 3) and cost.entries == pytest.approx(5 / 3)
    assert cost.overhead == pytest.approx((28 * 100 + 5 * 4) / (52 * 100))


@pytest.mark.parametrize("page", [16, 64, 256])
def test_half_a_page_stays_empty(page):
    lengths = np.arange(1, 4097)  # every remainder as often as any
    assert arithmetic.paging(lengths, page, 1.0).empty == (page - 1) / 2


@pytest.mark.parametrize(
    ("width", "prompt", "output", "apart", "shared"),
    [
        (4, 32, 16, 4 * 48, 32 + 4 * 16),  # whole pages
        (4, 20, 10, 4 * 32, 16 + 4 * 16),  # each copies the second page
        (4, 20, 0, 4 * 32, 32),  # nothing written, nothing copied
        (1, 20, 10, 32, 32),
    ],
)
def test_beams_by_hand(width, prompt, output, apart, shared):
    assert arithmetic.beams(width, prompt, output, 16) == (apart, shared)


def test_a_swap_by_hand():
    """100 tokens are 7 pages of 16; keys and values of 32 layers are a copy each."""
    link = Link(25e9, 10e-6, 16)
    wanted = 112 * 2**17 / 25e9 + 7 * 64 * 10e-6
    assert arithmetic.swap_seconds(SMALL, 100, link) == pytest.approx(wanted)


def test_reading_again_by_hand():
    """Blocks of 512 and 88 tokens: FLOPs are waited for, then the weights."""
    attention = 4 * 32 * 32 * 128
    first = (2 * 512 * MATRICES + attention * 512 * 512) / 312e12
    second = (2 * (MATRICES + NORMS) + (600 + 88) * 2**17) / 2.039e12
    found = arithmetic.recompute_seconds(SMALL, 600, A100)
    assert found == pytest.approx(first + second)
    rate = arithmetic.equal_rate(SMALL, 600, A100)
    assert rate == pytest.approx(600 * 2**17 / (first + second))


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda: arithmetic.kv_bytes(SMALL, 0, 1), "batch 0: must be at least 1"),
        (lambda: arithmetic.decode_step(SMALL, 1, 0), "tokens 0: must be at least 1"),
        (lambda: arithmetic.stored_bits(0.5), "bits 0.5: must be at least 1"),
        (
            lambda: arithmetic.draw_lengths("normal", 1, 1),
            "kind 'normal': lognormal or",
        ),
        (
            lambda: arithmetic.paging(np.ones(1, int), 0, 1.0),
            "page 0: must be at least",
        ),
        (lambda: arithmetic.beams(0, 1, 1, 16), "width 0: must be at least 1"),
        (lambda: arithmetic.recompute_seconds(SMALL, 1, A100, 0), "chunk 0: must be"),
    ],
)
def test_slips_are_one_line(ask, told):
    with pytest.raises(UserError, match=told) as caught:
        ask()
    assert "\n" not in str(caught.value)


def test_generating_by_hand():
    """Three tokens each, the first from the prompts' logits: steps of 65 and 66."""
    device = roofline.device("a100-80gb")
    full = arithmetic.decoding(SMALL, make_spec(SMALL, None, None), 2, 64, 3, device)
    weights, pair = 2 * (MATRICES + NORMS + HEAD), 2**17
    moved = 2 * weights + 2 * (66 + 67) * pair
    assert full.decode_tokens_per_s == pytest.approx(6 * 2.039e12 / moved)
    assert full.host_row_bytes == 0
    config = make_spec(SMALL, None, None, offload=Offload(4, 1))
    away = arithmetic.decoding(SMALL, config, 2, 64, 3, device)
    slots = away.host_row_bytes / (31 * 8 * 128 * 2)  # of 31 layers' values
    assert 67 <= slots <= 128 and away.rows > 1.8 * full.rows > 0


def test_values_that_leave_behind_the_arithmetic():
    """11 d + 2 s of the paper, with what its model's matrices really have: 12 d."""
    spec, rates = presets.spec("llama-2-7b"), roofline.Rates(1e12, 180e12, 32e9)
    matrices = (4 * 4096**2 + 3 * 4096 * 11_008) / 4096  # 12.06 d
    for prompt in (1024, 15_360):
        wanted = (matrices + 2 * prompt) / (180e12 / 32e9)
        assert arithmetic.hidden(spec, prompt, rates) == pytest.approx(wanted)
    fewer = arithmetic.hidden(SMALL, 1024, rates)  # 8 KV heads of 32: 4 times as easy
    flops = MATRICES / 32 / 1024 + 4 * 2 * 1024
    assert fewer == pytest.approx(flops / (180e12 / 32e9))
    assert arithmetic.hidden(SMALL, 1024, rates, bits=8) == pytest.approx(2 * fewer)
    assert arithmetic.hidden(SMALL, 1024, roofline.device("tpu-v5e").rates) == math.inf
