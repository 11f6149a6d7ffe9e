"""Our rules against choices that other people's code made on the same arrays.

The cases, and how each is driven, are in golden_cases.py. Here: what is said to be
identical is, at every ratio and step, in every head; what is said to differ differs in
the way that is said, so that a change on either side is noticed.
"""

import numpy as np
import pytest
from testing.golden_cases import (
    CASES,
    HEADS,
    MARGIN,
    SHARES,
    Replay,
    T,
    cold_slots,
    golden,
    laziness,
    scissorhands_visible,
    table,
    trimmed,
)

from kvjax import policies
from kvjax.types import Stats

IDENTICAL = [name for name, case in CASES.items() if case.identical]
DIFFERENT = [name for name, case in CASES.items() if not case.identical]


def common(a, b) -> float:
    """Share of positions [..., n] that two choices have in common."""
    pairs = zip(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), strict=True)
    return float(np.mean([len(set(x) & set(y)) / len(x) for x, y in pairs]))


@pytest.mark.parametrize("name", IDENTICAL)
def test_keeps_the_same_pairs(name):
    case = CASES[name]
    for saved in case.saved:
        ours, theirs = case.pair(saved)
        np.testing.assert_array_equal(ours, theirs, err_msg=saved)


def test_every_saved_choice_has_a_case():
    used = {saved for case in CASES.values() for saved in case.saved}
    kinds = {"kept", "trace", "slots", "visible", "strategy", "score"}
    choices = {saved for saved in golden() if saved.split("/")[1] in kinds}
    assert choices - used == {"kvpress/score/simlayerkv"}  # used with its threshold


def test_the_table_has_a_row_per_case():
    rows = table().splitlines()
    assert len(rows) == 2 + len(CASES)
    assert all(row.count("|") == 5 for row in rows)
    assert all(CASES[name].why for name in DIFFERENT)


# ---------------------------------------------------------------- scores

SCORED = (
    "tova_newest",
    "snapkv",
    "observed_attention",
    "keydiff",
    "knorm",
    "expected_attention",
    "expected_attention_mean",
    "lagkv",
    "lagkv_cross",
    "criticalkv_snapkv",
    "criticalkv_knorm",
    "criticalkv_expected",
)


@pytest.mark.parametrize("name", SCORED)
def test_scores_are_those_of_kvpress(name):
    """Where ours are finite; kvpress pins with numbers, different ones each time."""
    case = CASES[name]
    row = Replay(case.make()).read(T)
    for kept in case.saved:
        saved = kept.replace("kept", "scores")
        if saved not in golden():
            continue  # does not depend on the ratio
        ours, theirs = row.score(golden()[kept].shape[1]), golden()[saved]
        finite = np.isfinite(ours)
        assert finite.sum() >= HEADS * T // 2
        np.testing.assert_allclose(ours[finite], theirs[finite], 2e-4, 1e-7)


@pytest.mark.parametrize(
    ("weight", "saved", "sign"),
    [(0.07, "scores", 1), (1.0, "attention", 1), (0.0, "similarity", -1)],
)
def test_scores_are_those_of_r_kv(weight, saved, sign):
    """As a whole and each of the two terms; the newest 8 are pinned."""
    ours = Replay(policies.r_kv(weight=weight)).read(T).score(40)
    assert np.isposinf(ours[:, 88:]).all()
    theirs = sign * golden()[f"authors/{saved}/rkv"]
    np.testing.assert_allclose(ours[:, :88], theirs, 1e-4, 1e-9)


def test_every_key_of_r_kv_has_another_like_it():
    """The terms on which it is identical."""
    keys = golden()["kvpress/keys"][0]
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    cosine = np.einsum("kcd,ked->kce", unit, unit) - 2 * np.eye(T)
    assert (cosine.max(-1) > 0.5).all()


# ---------------------------------------------------------------- on purpose


def test_tova_lets_the_newest_compete():
    """One pair differs: theirs has the newest in place of our last."""
    case = CASES["tova"]
    ours, theirs = case.pair(*case.saved)
    score = Replay(case.make()).read(T).score(27)
    for head in range(HEADS):
        (lost,) = set(ours[head]) - set(theirs[head])
        assert set(theirs[head]) - set(ours[head]) == {T - 1}
        assert score[head, lost] == score[head, ours[head]].min()
    np.testing.assert_allclose(score[:, :-1], golden()[case.saved[0]][:, :-1], 1e-4)


def test_simlayerkv_of_kvpress_looks_one_pair_further_back():
    case = CASES["simlayerkv_press"]
    ours, theirs = case.pair(case.saved[0])
    assert [set(a) - set(b) for a, b in zip(ours, theirs, strict=True)] == [{80}, {80}]
    last = golden()["kvpress/weights"][0, :, :, -1].mean((0, 1))
    score = golden()["kvpress/score/simlayerkv"] + last[T - 1] - last[T - 17]
    assert trimmed(case.make, score - MARGIN).sum() == HEADS * 20
    assert trimmed(case.make, score + MARGIN).all()


def test_simlayerkv_counts_a_query_s_own_pair_in_its_window():
    """With a window one longer, the weight of the query's own pair comes on top."""
    saved = "authors/score/simlayerkv_prefill"
    case = CASES["simlayerkv_prefill"]
    ours, theirs = case.pair(saved)
    assert not np.array_equal(ours, theirs)
    longer = lambda threshold: policies.simlayerkv(threshold, sinks=4, recent=13)
    own = np.diagonal(golden()["kvpress/weights"][0], axis1=-2, axis2=-1)
    score = laziness(saved) + own[..., -32:].mean()
    assert trimmed(longer, score - MARGIN).sum() == HEADS * 17
    assert trimmed(longer, score + MARGIN).all()


def test_roco_differs_by_the_queries_that_sums_are_divided_by():
    """With EasyKV's count of queries for a pair's age, the steps are its own."""
    case = CASES["easykv_encoding_roco_forgetful"]
    ours, theirs = case.pair(*case.saved)
    np.testing.assert_array_equal(ours[0], theirs[0])
    assert 0.8 < common(ours, theirs) < 0.99
    row = Replay(case.make()).read(48, tell=False)
    position = np.arange(T)
    for step, stop in enumerate(range(56, T + 1, 8), start=1):
        row.read(stop)
        count = stop - np.maximum(position, 48)  # queries since the first eviction
        age = stop - position
        ratio = (age / np.where(count > 0, count, 1)).astype(np.float32)[None, None]
        own = row.stats
        row.stats = Stats(tuple(np.asarray(sums) * ratio for sums in own.per_slot))
        np.testing.assert_array_equal(row.drop(48).kept, theirs[step])
        row.stats = own


def test_scissorhands_of_the_authors_keeps_what_outgrows_an_old_threshold():
    """The first eviction is ours; told of undisturbed attention, ours keeps no more."""
    case = CASES["scissorhands"]
    ours, theirs = case.pair(*case.saved)
    np.testing.assert_array_equal(ours[:, :33], theirs[:, :33])
    assert 0.95 < (ours & theirs).sum() / (ours | theirs).sum() < 0.99
    undisturbed = scissorhands_visible(case.make, "", lossless=True)
    assert not (undisturbed & ~theirs).any()
    assert 0.9 < undisturbed.sum() / theirs.sum() < 0.99


def test_scissorhands_of_cold_compress_lets_a_prompt_vote_once():
    """First goes the oldest pair whose average over the prompt is below 1 / 40."""
    case = CASES["cold_scissorhands"]
    ours, theirs = case.pair(*case.saved)
    assert 0.8 < common(ours, theirs) < 0.95
    average = Replay(policies.average_attention()).read(40).score(39)[:, :40]
    low = (average < 1 / 40) & (np.arange(40) >= 4) & (np.arange(40) < 30)
    for head in range(HEADS):
        assert set(range(40)) - set(theirs[1, head]) == {np.argmax(low[head])}


def test_heavy_hitters_of_cold_compress_are_averages_at_first():
    case = CASES["cold_heavy_hitter"]
    ours, theirs = case.pair("authors/slots/heavy_hitter")
    np.testing.assert_array_equal(ours[:2], theirs[:2])
    assert 0.85 < common(ours, theirs) < 0.97


def test_heavy_hitters_of_cold_compress_count_a_prompt_as_one_query():
    """With its prompt's average and its count of queries, the steps are its own."""
    case = CASES["cold_heavy_hitter"]
    for saved, prompt in zip(case.saved, (40, 88), strict=True):
        theirs, position = cold_slots(saved), np.arange(T)
        row = Replay(case.make()).read(prompt)
        row.held[:] = [np.isin(position, head) for head in theirs[0]]
        row.shown[:] = row.held
        average = np.asarray(row.stats.per_slot) / np.maximum(prompt - position, 1)
        row.stats = Stats(per_slot=average.astype(np.float32))
        for step, now in enumerate(range(prompt, T)):
            ratio = np.where(position < prompt, (now - position) / (step + 1), 1.0)
            own = np.asarray(row.stats.per_slot)
            row.stats = Stats(per_slot=(own * ratio).astype(np.float32))
            row.drop(39).stats = Stats(per_slot=own)
            np.testing.assert_array_equal(row.read(now + 1).kept, theirs[step + 1])


def special_and_punctuation() -> np.ndarray:
    """bool[T], what every set of fastgen.yaml but the first contains."""
    ids = [golden()[f"authors/fastgen/{kind}"] for kind in ("special", "punctuation")]
    tokens = golden()["kvpress/tokens"]
    return np.isin(tokens, np.concatenate(ids)) | (np.arange(T) < 4)


def test_fastgen_of_cold_compress_climbs_the_same_ladder():
    """The same set for every head, but for one that its window takes past 0.954."""
    case, apart = CASES["fastgen"], []
    for share in SHARES:
        ours, theirs = case.pair(f"authors/strategy/fastgen@{share}")
        apart += [(share, head) for head in np.flatnonzero(ours != theirs)]
    assert apart == [(0.954, 0)]


@pytest.mark.parametrize("share", (0.5, 0.9))
def test_fastgen_of_cold_compress_takes_averages_outside_the_window(share):
    """Its heavy hitters: 39 of the room for 128, by average weight; its window, 38."""
    case = CASES["fastgen"]
    ours, theirs = case.pair(f"authors/kept/fastgen@{share}")
    assert not np.array_equal(ours, theirs)
    base, window = special_and_punctuation(), np.arange(T) >= T - 38
    strategies = golden()[f"authors/strategy/fastgen@{share}"]
    average = Replay(policies.average_attention()).read(T).score(T)
    total = average * (T - np.arange(T))
    for head, strategy in enumerate(strategies):
        its = base | window if strategy == 3 else base
        assert np.array_equal(theirs[head], its | heaviest(average[head], ~its, 39))
        sums = base | heaviest(total[head], ~base, 29)
        sums = sums | (np.arange(T) >= T - 28) if strategy == 3 else sums
        assert np.array_equal(ours[head], sums)


def heaviest(score: np.ndarray, among: np.ndarray, count: int) -> np.ndarray:
    """bool[T], the `count` highest scores of `among`."""
    chosen = np.zeros(T, bool)
    chosen[np.argsort(np.where(among, -score, np.inf))[:count]] = True
    return chosen & among


@pytest.mark.parametrize("past", (False, True))
def test_fastgen_recovers_what_cold_compress_recovers(past):
    """The share of the first set, as the threshold at which a head leaves it."""
    recovered = golden()["authors/recovered/fastgen"][0]
    share = recovered.max() + MARGIN if past else recovered.min() - MARGIN
    case = CASES["fastgen"]
    row = Replay(case.make(share=float(share))).read(T)
    assert (np.asarray(row.stats.per_row)[0] == int(past)).all()


def test_fastgen_of_hybrid_yaml_has_another_ladder():
    case = CASES["fastgen_hybrid_strategy"]
    theirs = [case.pair(saved)[1] for saved in case.saved]
    ours = [case.pair(saved)[0] for saved in case.saved]
    assert np.max(theirs) == 3 and np.max(ours) == 3
    assert not np.array_equal(ours, theirs)


def test_lag_kv_judges_again_what_is_live():
    """The same until the second choice, and different from then on."""
    case = CASES["lagkv_again"]
    ours, theirs = case.pair(*case.saved)
    same = [np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)]
    first = same.index(False)
    held = (theirs[0, 0] >= 0).sum()
    assert first == 4 and held == 64 - 2 * 8  # two partitions judged, 4 + 32 to go on
    assert ((theirs[first] >= 0).sum(-1) == held + first - 8).all()
    assert common(ours[first:], theirs[first:]) < 0.9
