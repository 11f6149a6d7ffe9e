"""Shares of heads: thresholds by hand, sizes to the last pair, files and slips."""

import dataclasses
import json
import os

import numpy as np
import pytest
from conftest import tiny_spec

from kvjax import UserError
from kvjax.cache import calibrations
from kvjax.cache.calibrations import Calibration, Measured, files
from kvjax.cache.calibrations.apportion import apportion

RNG = np.random.default_rng(0)
SPEC = tiny_spec()
MINE = "0123456789abcdef"
HALF = ((0.9, 0.5), (0.4, 0.2))
EIGHTH = ((0.3, 0.1), (0.05, 0.05))


def calibration(**changes):
    fields = {
        "model": "tiny",
        "fingerprint": MINE,
        "target": "repetition",
        "num_texts": 3,
        "tokens": 960,
        "accuracy": 0.9,
        "ratios": (0.5, 0.125),
        "shares": (HALF, EIGHTH),
        "similarity": (0.75, 0.875),
        "made_by": "hand, \u00e4",
    }
    return Calibration(**(fields | changes))


# --- Apportionment --------------------------------------------------------------------


def apportioned_by_hand(weights, total, least, most, multiple):
    """Bounds by taking out, one after the other, who is farthest beyond them."""
    held = {}
    while True:
        free = [i for i in range(len(weights)) if i not in held]
        if not free:
            break
        scale = (total - sum(held.values())) / sum(weights[i] for i in free)
        beyond = {
            i: (least - scale * weights[i], scale * weights[i] - most) for i in free
        }
        short = sum(max(low, 0) for low, _ in beyond.values())
        over = sum(max(high, 0) for _, high in beyond.values())
        side, bound = (0, least) if short >= over else (1, most)
        gone = [i for i in free if beyond[i][side] > 0]
        if not gone:
            break
        held |= dict.fromkeys(gone, bound)
    ideal = [held.get(i, scale * w) for i, w in enumerate(weights)]
    sizes = [max(int(x + 1e-9) // multiple * multiple, least) for x in ideal]
    most_lost = sorted(range(len(sizes)), key=lambda i: round(sizes[i] - ideal[i], 6))
    for i in most_lost:
        more = multiple - sizes[i] % multiple
        sizes[i] += min(more, most - sizes[i], total - sum(sizes))
    return sizes


def cases(count):
    for _ in range(count):
        size = int(RNG.integers(1, 30))
        weights = RNG.uniform(1e-3, 1, size) ** int(RNG.integers(1, 5))
        least = int(RNG.integers(0, 40))
        most = least + int(RNG.integers(0, 300))
        total = int(RNG.integers(least * size, most * size + 1))
        yield weights, total, least, most, int(RNG.choice([1, 7, 8, 16]))


def test_apportioned_as_by_hand():
    for given in cases(300):
        assert apportion(*given).tolist() == apportioned_by_hand(*given), given


def test_totals_and_bounds_hold():
    for weights, total, least, most, multiple in cases(500):
        sizes = apportion(weights, total, least, most, multiple)
        assert sizes.sum() == total and least <= sizes.min() and sizes.max() <= most
        inside = (sizes != least) & (sizes != most)
        assert np.sum(inside & (sizes % multiple != 0)) <= 1
        assert np.all(np.diff(sizes[np.argsort(weights)]) >= -multiple)


def test_apportioned():
    assert apportion(np.ones(3), 100, 8, 960, 8).tolist() == [36, 32, 32]
    assert apportion(np.array([[1.0, 3.0]]), 40, 0, 40).tolist() == [[10, 30]]
    assert apportion(np.array([1.0, 99.0]), 1000, 32, 960, 8).tolist() == [40, 960]
    assert apportion(np.ones(2), 2 * 1020, 8, 1020, 8).tolist() == [1020, 1020]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([], 0, 0, 1), "one or more numbers above 0"),
        (([1.0, 0.0], 2, 0, 2), "above 0"),
        (([1.0, np.nan], 2, 0, 2), "above 0"),
        (([1.0, 1.0], 7, 4, 9), "total of 7 .* 2 sizes of 4 to 9 each: give 8 to 18"),
        (([1.0, 1.0], 19, 4, 9), "total of 19"),
        (([1.0], 5, 6, 5), "most 5: must be at least 6"),
        (([1.0], 5.5, 0, 9), r"total is 5\.5"),
        (([1.0], 5, 0, 9, 0), "multiple 0"),
    ],
)
def test_what_cannot_be_apportioned(given, words):
    weights, *rest = given
    with pytest.raises(UserError, match=words):
        apportion(np.asarray(weights), *rest)


# --- From scores to shares ------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.75, 0.5, 0.3])
def test_one_threshold_for_all_heads(ratio):
    scores = RNG.uniform(size=(3, 2, 80)).astype(np.float32)
    scores[1] *= 0.1
    pairs = [
        (np.inf if i < 4 or i >= 64 else scores[layer, head, i], layer, head)
        for layer in range(3)
        for head in range(2)
        for i in range(80)
    ]
    best = sorted(pairs, reverse=True)[: round(ratio * len(pairs))]
    expected = np.zeros((3, 2))
    for _, layer, head in best:
        expected[layer, head] += 1 / 80
    found = calibrations.kept_shares(scores, ratio)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert np.all(found >= 20 / 80)


def test_equal_scores_keep_the_exact_count():
    found = calibrations.kept_shares(np.zeros((2, 2, 50), np.float32), 0.5)
    assert found.sum() * 50 == 100


def measured(shares, **changes):
    fields = {
        "model": "tiny",
        "fingerprint": "0",
        "target": "repetition",
        "tokens": 100,
        "ratios": (0.5,),
        "floor": 20,
        "shares": np.asarray(shares),
        "similarity": np.asarray([(0.5, 0.75), (0.6, 0.95)]),
        "accuracy": np.full(len(shares), 0.5),
    }
    return Measured(**(fields | changes))


def test_mean_floor_and_ratio():
    """Two texts; means of 1, .6, .3 and .1: a floor of .2 takes from those between."""
    shares = [[[[1.0, 0.7], [0.2, 0.1]]], [[[1.0, 0.5], [0.4, 0.1]]]]
    found = calibrations.average(measured(shares))
    assert found.shares == (((0.9474, 0.5684), (0.2842, 0.2)),)
    assert (found.num_texts, found.tokens, found.accuracy) == (2, 100, 0.5)
    assert found.similarity == (0.55, 0.85)


def test_stability():
    """Texts of two kinds: halves agree more, the more texts they are made of."""
    rng = np.random.default_rng(1)
    shares = 0.5 + 0.1 * rng.standard_normal((16, 1, 30, 4))
    found = calibrations.stability(shares, (2, 4, 16, 32))
    assert list(found) == [2, 4, 16]
    expected = [0.1 * np.sqrt(2 / half) * np.sqrt(2 / np.pi) for half in (1, 2, 8)]
    for apart, wanted in zip(found.values(), expected, strict=True):
        assert apart.shape == (1,) and apart[0] == pytest.approx(wanted, rel=0.15)
    same = calibrations.stability(np.ones((4, 2, 3, 2)), (2, 4))
    assert all(np.all(apart == 0) for apart in same.values())


# --- Shares and sizes -----------------------------------------------------------------


def test_shares_between_ratios():
    found = calibration()
    half, eighth = np.asarray(HALF), np.asarray(EIGHTH)
    for ratio, expected in (
        (0.5, half),
        (0.125, eighth),
        (0.3125, (half + eighth) / 2),
        (0.75, (half + 1) / 2),
        (1, np.ones((2, 2))),
        (0.0625, eighth / 2),
    ):
        shares = found.shares_at(ratio)
        np.testing.assert_allclose(shares, expected, rtol=1e-12)
        assert shares.mean() == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(0, "ratio 0.0"), (1.1, "ratio 1.1"), (-0.5, "above 0"), ("half", "'half'")],
)
def test_no_such_ratio(ratio, words):
    with pytest.raises(UserError, match=words):
        calibration().shares_at(ratio)


def test_sizes():
    sizes = calibration().sizes(SPEC, 120, length=960)
    assert sizes.tolist() == [[288, 96], [48, 48]] and sizes.sum() == 4 * 120
    assert calibration().sizes(SPEC, 960, length=960).tolist() == [[960] * 2] * 2
    for mean, length in ((33, 4000), (100, 200), (777, 1021), (1020, 1021)):
        sizes = calibration().sizes(SPEC, mean, length=length)
        assert sizes.sum() == 4 * mean and sizes.min() >= 32 and sizes.max() <= length
    assert calibration().sizes(SPEC, 16, length=960, floor=8).min() == 8


def apportioned(weights, mean, length, multiple=8):
    return apportion(weights, mean * len(weights), 32, length, multiple).tolist()


def test_layers_share_out_pairs():
    """Means of the layers are .7 and .3 at a half; their heads keep alike."""
    sizes = calibration().sizes(SPEC, 480, length=960, among="layers")
    assert sizes.tolist() == [[672, 672], [288, 288]]
    sizes = calibration().sizes(SPEC, 100, length=777, among="layers")
    ends = np.stack([np.mean(HALF, axis=1), np.mean(EIGHTH, axis=1)])
    part = (100 / 777 - 0.125) / 0.375
    expected = apportioned(ends[1] + part * (ends[0] - ends[1]), 100, 777)
    assert sizes.tolist() == [[size] * 2 for size in expected]


def test_heads_of_each_layer_share_out_pairs():
    """By .9 to .5 and .4 to .2, to the same total; no head keeps more than all."""
    how = {"length": 960, "among": "heads of each layer"}
    sizes = calibration().sizes(SPEC, 480, **how, multiple=1)
    assert sizes.tolist() == [[617, 343], [640, 320]]
    most = calibration(ratios=(0.75,), shares=(((1.0, 0.9), (0.95, 0.15)),))
    sizes = most.sizes(SPEC, 720, **how, multiple=1)
    assert sizes.tolist() == [[758, 682], [960, 480]]
    for mean, multiple in ((33, 8), (250, 64), (301, 128), (959, 8)):
        sizes = calibration().sizes(SPEC, mean, **how, multiple=multiple)
        assert sizes.sum(axis=1).tolist() == [2 * mean] * 2
        assert sizes.min() >= 32 and sizes.max() <= 960


@pytest.mark.parametrize("even", [0.0, 0.2, 0.75])
def test_sizes_between_calibrated_and_uniform(even):
    shares = (1 - even) * np.asarray(HALF) + even * 0.5
    how = {"length": 960, "even": even}
    sizes = calibration().sizes(SPEC, 480, **how)
    assert sizes.ravel().tolist() == apportioned(shares.ravel(), 480, 960)
    sizes = calibration().sizes(SPEC, 480, **how, among="layers")
    assert sizes[:, 1].tolist() == apportioned(shares.mean(axis=1), 480, 960)
    sizes = calibration().sizes(SPEC, 480, **how, among="heads of each layer")
    own = np.asarray(HALF) / np.mean(HALF, axis=1, keepdims=True) * 0.5
    for row, weights in zip(sizes, (1 - even) * own + even * 0.5, strict=True):
        assert row.tolist() == apportioned(weights, 480, 960)


@pytest.mark.parametrize("among", calibrations.AMONG)
def test_all_alike(among):
    """Whatever the multiple, which would tell equals apart."""
    how = {"length": 960, "multiple": 64, "among": among, "even": 1}
    assert calibration().sizes(SPEC, 250, **how).tolist() == [[250] * 2] * 2


@pytest.mark.parametrize(
    ("mean", "changes", "words"),
    [
        (
            40,
            {"length": 960, "among": "rows"},
            r"among is 'rows': use one of \('heads'",
        ),
        (40, {"length": 960, "even": 1.5}, r"even 1\.5: must be at most 1"),
        (31, {"length": 960}, "mean size 31: must be at least 32"),
        (8.5, {"length": 960}, r"mean size is 8\.5"),
        (961, {"length": 960}, "961 pairs is more than the text's 960 tokens"),
        (40, {"length": 960, "floor": 41}, "mean size 40: must be at least 41"),
        (40, {"length": 0}, "length 0"),
        (40, {"length": 960, "multiple": 0}, "multiple 0"),
    ],
)
def test_no_such_sizes(mean, changes, words):
    with pytest.raises(UserError, match=words):
        calibration().sizes(SPEC, mean, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "other"}, "'tiny' .* does not fit 'other'"),
        ({"num_layers": 3}, r"2 layers of 2 .* \(3 of 2\)"),
        ({"num_kv_heads": 3}, "2 of 3"),
        ({"fingerprint": "0" * 16}, r"other weights \(0123\w+\) than 'tiny' has \(000"),
        ({"fingerprint": MINE, "num_layers": 3}, r"\(3 of 2\)"),
    ],
)
def test_another_model(changes, words):
    for use in (Calibration.check, lambda *of: Calibration.sizes(*of, 64, length=960)):
        with pytest.raises(UserError, match=f"{words}.*kvjax.calibrate"):
            use(calibration(), tiny_spec(**changes))


@pytest.mark.parametrize(
    "changes", [{}, {"fingerprint": MINE}, {"fingerprint": "f16", "name": "9d2c1f0a"}]
)
def test_the_same_model(changes):
    """By its weights, whatever their name; by its name where nobody has weights."""
    calibration(float16="f16").check(tiny_spec(**changes))


# --- The user's folder ----------------------------------------------------------------


def test_what_is_kept_is_found_by_its_weights(own_calibrations):
    spec = tiny_spec(name="renamed", fingerprint=MINE)
    assert calibrations.find(spec) is None
    calibrations.keep(calibration(fingerprint="0" * 16))
    assert calibrations.find(spec) is None
    calibrations.keep(calibration())
    assert calibrations.find(spec) == calibration()
    assert calibrations.find(SPEC) is not None  # by its name: it has no weights
    assert calibrations.find(tiny_spec(fingerprint="1" * 16)) is None


def test_the_newest_is_found(own_calibrations):
    """One of the same target takes the other's place; another target stands beside."""
    first, again = calibration(), calibration(made_by="again")
    other, moved = calibration(target="attention"), calibration(target="loss")
    for age, found in ((3, first), (2, again), (1, moved), (4, other)):
        calibrations.keep(found)
        path = calibrations.kept_path(found)
        os.utime(path, (1e9 - age, 1e9 - age))
    assert len(list(own_calibrations.iterdir())) == 3
    assert calibrations.find(SPEC) == again  # sizes by loss are for one policy
    assert calibrations.find(SPEC, "attention") == other
    assert calibrations.find(SPEC, "loss") == moved
    os.utime(calibrations.kept_path(other), (1e9, 1e9))
    assert calibrations.find(SPEC) == other


def test_a_damaged_file_is_passed_over(own_calibrations):
    calibrations.keep(calibration())
    broken = own_calibrations / "a.json"
    broken.write_text("{")
    with pytest.warns(UserWarning, match=r"a\.json: not JSON, .*, or delete it"):
        assert calibrations.find(SPEC) == calibration()


def test_the_user_s_own_goes_before_the_package_s(own_calibrations):
    came = calibrations.shipped("smollm2-135m-instruct")
    spec = tiny_spec(num_layers=30, num_kv_heads=3, fingerprint=came.fingerprint)
    assert calibrations.find(spec) == came
    mine = dataclasses.replace(came, model="mine", made_by="me")
    calibrations.keep(mine)
    assert calibrations.find(spec) == mine


def test_the_folder_follows_the_cache_s(monkeypatch, tmp_path):
    monkeypatch.undo()  # of the folder that every test has
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    assert files.own_folder() == tmp_path / "calibrations"


def test_a_folder_that_cannot_be_made(own_calibrations):
    own_calibrations.write_text("a file")
    with pytest.raises(UserError, match=r"cannot be made: File exists; .*KVJAX_CACHE"):
        calibrations.keep(calibration())


# --- Files ----------------------------------------------------------------------------


def test_round_trip(tmp_path):
    """What is saved is loaded, equal and hashable; a line per layer."""
    path = tmp_path / "sizes.json"
    calibration().save(path)
    assert Calibration.load(path) == calibration()
    assert hash(Calibration.load(path)) == hash(calibration())
    assert "   [0.9, 0.5],\n   [0.4, 0.2]\n" in path.read_text(encoding="utf-8")


def test_a_path_that_cannot_be_written(tmp_path):
    with pytest.raises(
        UserError, match=r"absent/sizes.json cannot be written: No such"
    ):
        calibration().save(tmp_path / "absent" / "sizes.json")


def no(name):
    return lambda found: found.pop(name)


def put(name, value):
    return lambda found: found.update({name: value})


def put_shares(ratio, rows):
    return lambda found: found["shares"].update({ratio: rows})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no("format"), "its format is not 1"),
        (put("format", 2), "its format is not 1"),
        (no("tokens"), "it has no tokens"),
        (no("shares"), "it has no shares"),
        (put("colour", 3), "unknown field 'colour'"),
        (put("model", 3), "model is 3: give a text"),
        (put("tokens", "many"), "tokens is 'many'"),
        (put("num_texts", 0), "num_texts 0"),
        (put("accuracy", float("nan")), "accuracy is nan"),
        (put("shares", []), "its shares are not an object with rows"),
        (
            put("similarity", 0.5),
            "its similarity is not a list",
        ),
        (put("similarity", [0.5]), "similarity of 1 layers for shares of 2"),
        (put("similarity", [0.5, 1.5]), "similarity 1.5"),
        (put("similarity", [0.5, "a"]), "similarity is 'a'"),
        (put("shares", {}), "ratios is ()"),
        (put_shares("many", [[0.5]]), "'many'] are not numbers"),
        (put_shares("0.7", [[0.7, 0.7]] * 2), "give descending ones between 1 and 0"),
        (put_shares("0.5", [[0.5, 0.5]]), "not [L][K] numbers"),
        (put_shares("0.5", [[0.5, 0.5], [0.5]]), "not [L][K] numbers"),
        (put_shares("0.5", [["a", "b"], ["c", "d"]]), "not [L][K] numbers"),
        (put_shares("0.5", 0.5), "not [L][K] numbers"),
        (put_shares("0.5", [[0.9, 0.5], [0.6, 0.0]]), "share of 0.0 at ratio 0.5"),
        (put_shares("0.5", [[1.1, 0.5], [0.2, 0.2]]), "share of 1.1"),
        (put_shares("0.5", [[0.9, 0.5], [0.4, 0.4]]), "have a mean of 0.55"),
    ],
)
def test_a_damaged_file(tmp_path, damage, words):
    path = tmp_path / "sizes.json"
    calibration().save(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    damage(found)
    path.write_text(json.dumps(found))
    refused(path, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b'{\n "a": 1', "not JSON, line 2"),
        (b"\xff\xfe\x00", "decode byte 0xff"),
        (b"[1, 2]", "not a JSON object"),
        (b"", "not JSON, line 1"),
    ],
)
def test_no_such_file(tmp_path, content, words):
    path = tmp_path / "sizes.json"
    if content is not None:
        path.write_bytes(content)
    refused(path, words)


def refused(path, words):
    """One line with the path, the value and the remedy."""
    with pytest.raises(UserError) as caught:
        Calibration.load(path)
    line = str(caught.value)
    assert line.startswith(f"calibration {path}: ") and words in line, line
    assert "\n" not in line and line.endswith("make it with kvjax.calibrate")


def test_files_from_before_layers_were_compared(tmp_path):
    path = tmp_path / "sizes.json"
    calibration().save(path)
    told = json.loads(path.read_text(encoding="utf-8"))
    told.pop("similarity")
    told.pop("float16")
    path.write_text(json.dumps(told), encoding="utf-8")
    assert Calibration.load(path) == calibration(similarity=())


def test_sets_of_shares_without_a_ratio():
    with pytest.raises(UserError, match="1 sets of shares for 2 ratios"):
        dataclasses.replace(calibration(), shares=(HALF,))


def test_shipped():
    found = calibrations.shipped("smollm2-135m-instruct")
    assert (found.num_layers, found.num_kv_heads, found.tokens) == (30, 3, 960)
    assert found.ratios == (0.5, 0.25, 0.125) and found.num_texts == 16
    sizes = np.sort(np.ravel(found.shares[1])) * found.tokens
    assert sizes[0] >= 32 and sizes[-1] > 800 and np.median(sizes) < 240
    with pytest.raises(UserError, match=r"no calibration of 'gpt'.*kvjax.calibrate"):
        calibrations.shipped("gpt")


def test_shipped_by_loss():
    """The heads that retrieve are the same as in the sizes that it began with."""
    found = calibrations.shipped("smollm2-135m-instruct", "loss")
    start = calibrations.shipped("smollm2-135m-instruct")
    assert (found.target, found.ratios) == ("loss", (0.25, 0.125))
    assert found.fingerprint == start.fingerprint
    for ratio, shares in zip(found.ratios, map(np.array, found.shares), strict=True):
        first = start.shares_at(ratio)
        large = 0.65 * first + 0.35 * ratio > 1.2 * ratio
        assert np.all((shares > 1.2 * ratio) == large) and np.min(shares) * 960 >= 56
    with pytest.raises(UserError, match="target is 'mass': use one of"):
        calibrations.shipped("smollm2-135m-instruct", "mass")
