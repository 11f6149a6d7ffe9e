"""Tests of `fit_heads`: rounds worked out by hand, a tiny model, every user error."""

import dataclasses
import itertools

import numpy as np
import pytest
from conftest import tiny_model, tiny_spec
from testing import prose

from kvjax import UserError
from kvjax.cache.calibrations import Calibration
from kvjax.engine import calibration as measuring
from kvjax.models import placement
from kvjax.parallel import meshes
from kvjax.training import excerpts, fit_heads, head_sizes
from kvjax.types import Model

TOKENS = 288
TEXTS = tuple(prose.HAYSTACK[start : start + 4000] for start in (0, 4500, 9000))
SHARES = ((0.7, 0.2), (0.3, 0.4))  # one head of four retrieves


@pytest.fixture(scope="module")
def model():
    """Random weights, of a seed whose loss two rounds lower; not every seed's is."""
    spec = tiny_spec(
        vocab_size=len(prose.HAYSTACK_WORDS) + 2, name="reader", context_length=1024
    )
    changes = {"vocab_size": spec.vocab_size, "context_length": 1024}
    params = tiny_model(seed=1, **changes).params
    return Model(spec, params, prose.make_tokenizer())


@pytest.fixture
def start(model):
    """A calibration of the model."""
    return Calibration(
        *("reader", measuring.fingerprint(model), "repetition", 2, TOKENS, 0.9),
        ratios=(0.4,),
        shares=(SHARES,),
        similarity=(0.5, 0.9),
    )


# --- Excerpts -------------------------------------------------------------------------


def test_excerpts(model):
    """An excerpt is a text, an instruction and passages; both parts are compared."""
    for text, found in zip(
        TEXTS, excerpts.make(model, TEXTS, TOKENS, 0, 40), strict=True
    ):
        ids = model.tokenizer(text)["input_ids"][:TOKENS]
        tokens = found.tokens[0].tolist()
        assert tokens[:TOKENS] == ids and len(tokens) % 40 == 0
        assert np.allclose(found.weights.sum(axis=0), 1)
        read, again = (found.at[found.weights[:, i] > 0] for i in (0, 1))
        assert sorted(read) == list(range(TOKENS // 3, TOKENS - 1))
        assert len(again) == 5 * (48 - 12)
        passages = [p.tolist() for p in again.reshape(5, -1)]
        for places in passages:  # 36 in a row, each the next token of a passage
            assert places == list(range(places[0], places[0] + 36))
            first = places[0] - 11
            passage = tokens[first : first + 48]
            assert any(ids[i : i + 48] == passage for i in range(TOKENS))
    one, two = (excerpts.make(model, TEXTS[:1], TOKENS, seed, 32) for seed in (0, 1))
    assert one[0].tokens.tolist() != two[0].tokens.tolist()


# --- One round ------------------------------------------------------------------------


def unbounded(sizes):
    return np.full(sizes.shape, 1.0), np.full(sizes.shape, 1e6)


def test_equal_worth_moves_nothing():
    sizes = np.array([[10.0, 30.0], [20.0, 60.0]])
    found = head_sizes.moved(sizes, np.full((2, 2), 0.3), 30, unbounded(sizes))
    np.testing.assert_allclose(found, sizes)


def test_a_round_by_hand():
    """Worth 4, 1, 1 and 1 at a price of 1.75: sizes times (worth / price) ^ 0.5."""
    sizes, worth = np.full((2, 2), 30.0), np.array([[4.0, 1.0], [1.0, 1.0]])
    found = head_sizes.moved(sizes, worth, 30, unbounded(sizes), 0.5)
    weights = 30 * (worth / 1.75) ** 0.5
    np.testing.assert_allclose(found, weights * 120 / weights.sum())


def test_bounds_and_totals():
    rng = np.random.default_rng(0)
    for _ in range(50):
        first = rng.uniform(60, 900, (5, 3))
        mean, floor, length = round(first.mean()), 56, 960
        bounds = head_sizes._bounds(first, mean, floor, length)
        sizes = head_sizes._projected(first, mean, bounds)
        for _ in range(4):
            sizes = head_sizes.moved(sizes, rng.normal(1, 1, (5, 3)), mean, bounds)
            assert sizes.sum() == pytest.approx(15 * mean)
            assert np.all((bounds[0] - 1e-6 <= sizes) & (sizes <= bounds[1] + 1e-6))
        large = first > 1.2 * mean
        assert np.all((sizes > 1.3 * mean) == large)  # retrieval heads stay such


def test_a_head_moves_so_far_at_most():
    sizes, worth = np.full((1, 100), 30.0), np.ones((1, 100))
    worth[0, :2] = 1e9, -1e9
    found = head_sizes.moved(sizes, worth, 30, unbounded(sizes))
    assert found[0, 0] / found[0, 2] < head_sizes.STEP**2 + 1e-6
    assert found[0, 1] < found[0, 2] and found.sum() == pytest.approx(3000)


def test_no_worth_at_all_moves_nothing():
    sizes = np.full((2, 2), 30.0)
    found = head_sizes.moved(sizes, -np.ones((2, 2)), 30, unbounded(sizes))
    np.testing.assert_array_equal(found, sizes)


# --- The whole ------------------------------------------------------------------------


def test_fitted(model, start):
    """Returns the sizes of the round of least loss, which is not the first."""
    seen = []
    found = fit_heads(
        model, TEXTS, start, rounds=2, even=0.0, floor=56, on_round=seen.append
    )
    losses = [each.loss for each in seen]
    assert [each.number for each in seen] == [0, 1, 2] and min(losses) < losses[0]
    best = seen[int(np.argmin(losses))]
    np.testing.assert_allclose(np.array(found.shares[0]) * TOKENS, best.sizes, atol=0.6)
    assert (found.target, found.ratios, found.num_texts) == ("loss", (0.4,), 3)
    assert np.mean(found.shares) == pytest.approx(0.4, abs=1e-9)
    assert found.similarity == start.similarity and found.tokens == start.tokens
    assert found.shares[0][0][0] > 1.2 * 0.4 > max(found.shares[0][1])
    for each in seen:
        assert 0 < each.text < 10 and each.worth.shape == (2, 2)
        assert each.loss == pytest.approx(each.text + 0.02 * each.passages)


def test_passages_count_as_asked(model, start):
    """Loss and worth are linear in the weight; smaller chunks allow a lower floor."""
    seen = []
    for weight in (0.0, 1.0, 3.0):
        found = fit_heads(
            *(model, TEXTS[:1], start),
            chunk=16,
            passages=weight,
            rounds=1,
            on_round=seen.append,
        )
        assert np.min(found.shares) * TOKENS >= 40 - 1e-6
    zero, one, three = seen[::2]
    assert zero.loss == pytest.approx(zero.text)
    assert three.loss == pytest.approx(zero.text + 3 * one.passages, rel=1e-5)
    expected = zero.worth + 3 * (one.worth - zero.worth)
    np.testing.assert_allclose(three.worth, expected, rtol=1e-3, atol=1e-8)
    assert np.abs(one.worth - zero.worth).max() > 1e-6


@pytest.mark.e2e
def test_over_a_mesh(model, start):
    """Split params have the same losses and worths."""
    over = meshes.mesh("data:4,model:2", model.spec.num_kv_heads)
    params = placement.split(model.spec, model.params, over)
    parted = model._replace(spec=placement.fitted(model.spec, over), params=params)
    one, two = [], []
    for each, rounds in ((model, one), (parted, two)):
        fit_heads(each, TEXTS[:1], start, rounds=1, on_round=rounds.append)
    for a, b in zip(one, two, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-3)
        np.testing.assert_allclose(a.worth, b.worth, rtol=1e-2, atol=1e-7)


def test_a_round_that_loses_is_taken_back(model, start, monkeypatch):
    """A round of higher loss is undone: the next starts from the best, at half rate."""
    losses = itertools.chain((1.0, 0.5), itertools.repeat(0.9))
    worth, seen = np.array([[1.0, 2.0], [0.5, 1.0]]), []
    monkeypatch.setattr(head_sizes, "_round", lambda *_: ([next(losses), 0.0], worth))
    fit_heads(model, TEXTS[:1], start, rounds=4, even=0.0, on_round=seen.append)
    mean, length = 115, TOKENS
    bounds = head_sizes._bounds(seen[0].sizes, mean, 56, length)
    rates = 0.35, 0.35, 0.175, 0.0875
    for each, before, rate in zip(seen[1:], (0, 1, 1, 1), rates, strict=True):
        expected = head_sizes.moved(seen[before].sizes, worth, mean, bounds, rate)
        np.testing.assert_allclose(each.sizes, expected)


def test_known_rounds_are_not_run_again(model, start, monkeypatch):
    """A call resumed after any round returns the same sizes."""
    options = {"ratios": (0.5, 0.4), "rounds": 1, "even": 0.0}
    every, counted = [], []
    whole = fit_heads(model, TEXTS[:1], start, on_round=every.append, **options)
    assert [(each.ratio, each.number) for each in every] == [
        *((0.5, 0), (0.5, 1)),
        *((0.4, 0), (0.4, 1)),
    ]
    run = head_sizes._round
    monkeypatch.setattr(
        head_sizes, "_round", lambda *args: counted.append(1) or run(*args)
    )
    for done in range(5):
        counted.clear()
        again = fit_heads(model, TEXTS[:1], start, known=every[:done], **options)
        assert again == whole and len(counted) == 4 - done


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ratios": (0,)}, "give descending ones between 1 and 0"),
        ({"ratios": 0.4}, r"ratios is 0\.4: give one or more"),
        ({"ratios": ("a",)}, "ratio is 'a'"),
        ({"ratios": (0.4, 0.1)}, "0.1 of 288 tokens is 29 pairs, less than the 56"),
        ({"floor": 20}, "floor 20: must be at least 53"),
        ({"chunk": 16, "floor": 36}, "floor 36: must be at least 37"),
        ({"chunk": 0}, "chunk 0: must be at least 1"),
        ({"even": 2}, "even 2.0: must be at most 1"),
        ({"passages": -1}, "passages -1.0: must be at least 0"),
        ({"rounds": 0}, "rounds 0: must be at least 1"),
        ({"texts": TEXTS[0]}, "give a list of one or more"),
        (
            {"texts": [TEXTS[0], "too short"]},
            r"text 1 has \d+ tokens: give texts of 288",
        ),
    ],
)
def test_slips(model, start, changes, words):
    arguments = {"texts": TEXTS, "calibration": start} | changes
    with pytest.raises(UserError, match=words):
        fit_heads(model, **arguments)


def test_the_old_name_of_on_round(model, start, monkeypatch):
    monkeypatch.setattr(head_sizes, "_round", lambda *_: ([1.0, 0.0], np.ones((2, 2))))
    seen = []
    with pytest.warns(DeprecationWarning, match="write on_round for told"):
        fit_heads(model, TEXTS[:1], start, rounds=1, told=seen.append)
    assert [each.number for each in seen] == [0, 1]


def test_other_models(model, start, tiny):
    with pytest.raises(UserError, match=r"other weights \(\w+\) than 'tiny' has"):
        fit_heads(tiny, TEXTS, start)
    with pytest.raises(UserError, match="of 200 tokens: passages need 288"):
        fit_heads(model, TEXTS, dataclasses.replace(start, tokens=200))
    other = dataclasses.replace(start, fingerprint="0" * 16)
    with pytest.raises(UserError, match="was made with other weights"):
        fit_heads(model, TEXTS, other)
    small = dataclasses.replace(model.spec, context_length=500)
    with pytest.raises(
        UserError, match=r"288 tokens and passages .* take 5\d\d, .* 500"
    ):
        fit_heads(model._replace(spec=small), TEXTS, start)
    with pytest.raises(UserError, match="no tokenizer to ask for passages"):
        fit_heads(model._replace(tokenizer=None), [[1] * 300], start)
