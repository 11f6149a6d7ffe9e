"""Scores of pairs by a decoder in NumPy; what is read, and every slip told early."""

import dataclasses
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_model, tiny_spec
from testing import oracle, prose

import kvjax
from kvjax import UserError
from kvjax.cache import budgets, calibrations, head_groups
from kvjax.engine import calibration
from kvjax.models import fingerprints, placement
from kvjax.models.fingerprints import fingerprint
from kvjax.parallel import meshes
from kvjax.types import Model

ROOT = pathlib.Path(__file__).parents[2]
TOKENS = 70
TEXTS = prose.HAYSTACK[:2000], prose.HAYSTACK[3000:5000]
RATIOS = 0.75, 0.5
MESHES = ["data:4,model:2", "model:8"]


@pytest.fixture(scope="module")
def model():
    """Reads words: unknown ones, as those of the instruction, are token 0, BOS is 1."""
    spec = tiny_spec(vocab_size=len(prose.HAYSTACK_WORDS) + 2, name="reader")
    params = tiny_model(vocab_size=spec.vocab_size).params
    return Model(spec, params, prose.make_tokenizer(bos=True))


def by_hand(model, ids, length, start, score):
    """Scores [L, K, length], cosines [L], right guesses of tokens after `start`."""
    decoder = oracle.Decoder(model.spec, model.params, None, None, None)
    if start:
        decoder.step(ids[:start])
    guesses = [int(np.argmax(decoder.step([token]))) for token in ids[start:]]
    found = [
        [[score(pair, start) for pair in head.pairs[:length]] for head in layer.heads]
        for layer in decoder.layers
    ]
    right = [a == b for a, b in zip(guesses[:-1], ids[start + 1 :], strict=True)]
    cosines = [np.mean(layer[:length]) for layer in decoder.cosines]
    return np.asarray(found), cosines, np.mean(right)


def largest(pair, start):
    """KVzip: over the queries from `start` on, and the heads of each."""
    return max(max(w) for query, w in pair.weights.items() if query >= start)


def received(pair, start):
    return oracle.mass(pair)


def test_repetition(model):
    """BOS and text, the instruction, the text again: the second one asks."""
    (read, _) = calibration.readings(model, TEXTS, "repetition", TOKENS)
    text = model.tokenizer(TEXTS[0])["input_ids"][:TOKENS]
    between = [0, 0, 0, 0, 0, 2]  # five words and the full stop
    assert text[0] == 1 and list(read.ids) == [*text, *between, *text[1:]]
    assert read.asking == (TOKENS + 6, len(read.ids)) and len(read.ids) > 128
    scores, similarity, accuracy = calibration.scored(model, read)
    given = read.ids, TOKENS, read.asking[0], largest
    expected, cosines, right = by_hand(model, *given)
    assert scores.shape == (2, 2, TOKENS) and scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, rtol=2e-4)
    np.testing.assert_allclose(similarity, cosines, rtol=2e-5)
    assert accuracy == pytest.approx(right)


def test_attention(model):
    (read,) = calibration.readings(model, TEXTS[:1], "attention", 150)
    assert len(read.ids) == 150 and read.asking == (0, 150)
    scores, similarity, accuracy = calibration.scored(model, read)
    expected, cosines, right = by_hand(model, read.ids, 150, 0, received)
    np.testing.assert_allclose(similarity, cosines, rtol=2e-5)
    np.testing.assert_allclose(scores, expected, rtol=2e-4)
    assert accuracy == pytest.approx(right)
    np.testing.assert_allclose(scores.sum(axis=-1), 150, rtol=1e-4)


@pytest.mark.parametrize("asked", often(MESHES, MESHES[:1], others="e2e"))
def test_over_a_mesh(model, asked):
    """The same scores, and the same fingerprint, of params that are split."""
    over = meshes.mesh(asked, model.spec.num_kv_heads)
    params = placement.split(model.spec, model.params, over)
    parted = model._replace(spec=placement.fitted(model.spec, over), params=params)
    (read,) = calibration.readings(model, TEXTS[:1], "repetition", TOKENS)
    one, two = (calibration.scored(each, read) for each in (model, parted))
    np.testing.assert_allclose(two.scores, one.scores, rtol=1e-4)
    np.testing.assert_allclose(two.similarity, one.similarity, rtol=1e-4)
    assert two.accuracy == one.accuracy
    assert fingerprint(parted) == fingerprint(model)


def test_calibrated(model):
    """Each text's shares by its own threshold; their mean adds up to the ratio."""
    given = {"tokens": TOKENS, "floor": 25}
    measured = calibration.measure(model, TEXTS, RATIOS, "repetition", **given)
    read = calibration.readings(model, TEXTS, "repetition", TOKENS)
    for text, reading in enumerate(read):
        scores, similarity, _ = calibration.scored(model, reading)
        np.testing.assert_array_equal(measured.similarity[text], similarity)
        for number, ratio in enumerate(RATIOS):
            expected = calibrations.kept_shares(scores, ratio)
            np.testing.assert_array_equal(measured.shares[text, number], expected)
            assert expected.sum() * TOKENS == pytest.approx(round(ratio * 4 * TOKENS))
    found = kvjax.calibrate(model, TEXTS, RATIOS, **given)
    assert found == calibrations.average(measured)
    assert (found.model, found.target, found.num_texts) == ("reader", "repetition", 2)
    for ratio, rows in zip(found.ratios, found.shares, strict=True):
        assert np.mean(rows) == pytest.approx(ratio, abs=1e-9)
        assert np.min(rows) >= 25 / TOKENS
    found.check(fingerprints.marked(model))


def test_weights_that_were_calibrated(model, tmp_path):
    """`calibrate`, then a share: for these weights, and for no others of their name."""
    other = model._replace(
        params=model.params | {"embed": model.params["embed"] * 1.1},
        spec=fingerprints.marked(model),  # of what it was made of
    )
    renamed = model._replace(spec=dataclasses.replace(model.spec, name="9d2c1f0a"))
    prompts = [TEXTS[0][:700]]
    how = {"policy": "key_diff", "budget": "50%", "max_new_tokens": 2}
    with pytest.warns(UserWarning, match="no calibration of the weights of reader"):
        assert sizes_of(kvjax.plan(model, prompt_tokens=128, **how)) == {64}
    found = kvjax.calibrate(model, TEXTS, RATIOS, tokens=TOKENS, floor=25)
    expected = found.sizes(model.spec, 64, length=128, floor=48, multiple=32)
    for each in (model, renamed):
        plan = kvjax.plan(each, prompt_tokens=128, **how)
        assert sizes_of(plan) == set(expected.flat) and len(sizes_of(plan)) > 1
    (done,) = kvjax.generate(renamed, prompts, **how)
    kept = {len(head) for layer in done.kept_positions for head in layer}
    assert len(kept) > 1
    assert 0 in done.kept_positions[0][0] and 3 in done.kept_positions[1][1]
    with pytest.warns(UserWarning, match="no calibration of the weights of reader"):
        assert sizes_of(kvjax.plan(other, prompt_tokens=128, **how)) == {64}
    found.save(tmp_path / "mine.json")
    for rule in (found, budgets.make("calibrated", path=tmp_path / "mine.json")):
        told = how | {"budget_rule": rule}
        for use in (
            lambda told: kvjax.plan(other, prompt_tokens=128, **told),
            lambda told: kvjax.generate(other, prompts, **told),
        ):
            with pytest.raises(UserError, match=r"made with other weights .*calibrate"):
                use(told)


def sizes_of(plan):
    return head_groups.distinct_sizes(plan.job.config.budget)


def test_python_s_documentation_where_nobody_gives_texts(model, monkeypatch):
    asked = []
    monkeypatch.setattr(calibration, "measure", lambda *given: asked.append(given))
    monkeypatch.setattr(calibrations, "average", lambda found: None)
    monkeypatch.setattr(calibrations, "keep", lambda found: None)
    kvjax.calibrate(model)
    _, texts, *_ = asked[0]
    assert len(texts) == 16 and min(map(len, texts)) > 10_000
    assert "assert" in texts[0]


def test_a_calibration_that_cannot_be_kept(tiny, own_calibrations):
    own_calibrations.write_text("no folder")
    texts = np.random.default_rng(0).integers(0, 50, (1, 64)).tolist()
    given = {"target": "attention", "tokens": 64}
    with pytest.warns(UserWarning, match="returned but not saved: .* KVJAX_CACHE"):
        assert kvjax.calibrate(tiny, texts, (0.5,), **given).num_texts == 1


def test_ids_need_no_tokenizer(tiny):
    """A model of random weights, asked while it reads; texts are given as ids."""
    texts = np.random.default_rng(0).integers(0, 50, (2, 64)).tolist()
    found = kvjax.calibrate(tiny, texts, (0.5,), target="attention", tokens=64)
    assert found.num_layers == found.num_kv_heads == 2


def test_16_bits_are_the_same_model(tiny):
    """bfloat16 has the same fingerprint; float16 the one that calibrations say too."""
    halves = lambda kind: {"embed": tiny.params["embed"].astype(kind)}
    of = lambda embed: fingerprint(tiny._replace(params=tiny.params | embed))
    assert of(halves(jnp.bfloat16)) == fingerprint(tiny)
    half = tiny._replace(
        params=jax.tree.map(lambda leaf: leaf.astype(jnp.float16), tiny.params)
    )
    assert fingerprint(half) == fingerprint(tiny, jnp.float16) != fingerprint(tiny)
    assert of({"embed": tiny.params["embed"] * 1.1}) != fingerprint(tiny)
    texts = np.random.default_rng(0).integers(0, 50, (1, 64)).tolist()
    kvjax.calibrate(tiny, texts, (0.5,), target="attention", tokens=64)
    assert calibrations.find(fingerprints.marked(half))


def test_the_fingerprint_of_an_oracle(tiny):
    """Of the numbers themselves, hashed here."""
    layers, digest = tiny.params["layers"], hashlib.sha256()
    for some in (
        np.asarray(tiny.params["embed"])[0],
        np.asarray(layers[0]["qkv"])[:, 0],
        np.asarray(layers[1]["qkv"])[:, 0],
    ):
        bits = some.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to even
        digest.update(rounded.astype(np.uint16).tobytes())
    assert fingerprint(tiny) == digest.hexdigest()[:16]


@pytest.mark.parametrize(
    ("texts", "changes", "words"),
    [
        (TEXTS, {"target": "needle"}, "target 'needle' is unknown: give repetition or"),
        (TEXTS, {"tokens": 1000}, r"text 0 has \d+ tokens: give texts of 1000"),
        (TEXTS, {"tokens": 130}, "130 tokens take 265 .* has 256: lower tokens"),
        (TEXTS, {"tokens": 1.5}, r"tokens is 1\.5"),
        (TEXTS, {"floor": 19}, "floor 19: must be at least 20"),
        (TEXTS, {"ratios": (0.5, 0.4)}, "0.4 of 70 tokens is less than the 32 pairs"),
        (TEXTS, {"ratios": (0.25, 0.5)}, "give descending ones"),
        (TEXTS, {"ratios": ()}, "ratios is "),
        (TEXTS, {"ratios": "0.5"}, "ratios is '0.5'"),
        (TEXTS, {"ratios": (1.0, 0.5)}, "between 1 and 0"),
        (TEXTS[0], {}, "give a list of one or more"),
        ([[1, 2, 5000]], {}, "token 5000"),
    ],
)
def test_refused(model, texts, changes, words):
    given = {"tokens": TOKENS, "ratios": RATIOS} | changes
    with pytest.raises(UserError, match=words):
        kvjax.calibrate(model, texts, **given)


def test_models_that_cannot_be_asked(tiny):
    with pytest.raises(UserError, match=r"tiny has no tokenizer .* another target"):
        kvjax.calibrate(tiny, [[1] * 64], (0.5,), tokens=64)
    with pytest.raises(UserError, match=r"give what kvjax\.load returns"):
        kvjax.calibrate("tiny", TEXTS)


# --- The command ----------------------------------------------------------------------


def command(folder, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / "experiments/calibrate.py", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output=a/b.json"], "--output=a/b.json: name a file in a folder"),
        (["--output=b.json", "--texts="], "--texts is empty"),
        (["--output=b.json", "--texts=no*.txt"], "--texts=no*.txt: there is no such"),
        (["--output=b.json", "--texts=python", "--ratios=x"], "--ratios is 'x'"),
        (["--output=b.json", "--half=third"], "--half=third"),
        (["--output=b.json", "--start=a.json"], "--start goes with --fit_rounds"),
        (["--output=b.json", "--fit_rounds=-1"], "--fit_rounds=-1"),
    ],
)
def test_slips(tmp_path, arguments, words):
    """Exit code 2, one line, no traceback, nothing written."""
    done = command(tmp_path, *arguments)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and words in line and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.e2e
@pytest.mark.model
def test_command(tmp_path, smollm2):
    """Three short windows of two sources; the last line is JSON, the file loads."""
    (tmp_path / "a.txt").write_text(prose.HAYSTACK)
    done = command(
        *(tmp_path, "--texts=*.txt,python", "--num_texts=3", "--tokens=160"),
        *("--ratios=0.5,0.25", "--output=found.json", "--picture"),
        "--dtype=float32",  # whose roundings to 16 bits are those of the file
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert list(told["stability"]["0.5"]) == ["2"] and told["num_texts"] == 3
    assert (tmp_path / told["picture"]).read_bytes()[:4] == b"\x89PNG"
    found = calibrations.Calibration.load(tmp_path / told["calibration"])
    assert found.ratios == (0.5, 0.25) and "--num_texts=3" in found.made_by
    assert smollm2.spec.fingerprint == found.fingerprint
    shipped = calibrations.shipped(found.model)
    shipped.check(smollm2.spec)
    assert shipped.float16 == found.float16
    alike = np.corrcoef(np.ravel(shipped.shares[1]), np.ravel(found.shares[1]))[0, 1]
    assert alike > 0.7
