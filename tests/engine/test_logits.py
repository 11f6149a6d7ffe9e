"""Repetition penalty and log-probabilities against transformers and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine.logits import mark_seen, penalized, top_logprobs

ROWS, VOCAB = 4, 30
PENALTIES = jnp.float32([1.3, 0.7, 1.0, 2.5])
LOGITS = np.random.default_rng(0).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (ROWS, 12)).astype(np.int32)
NOTHING = jnp.zeros((ROWS, VOCAB), bool)


def test_seen_tokens_are_the_first_n_of_each_row():
    lengths = [12, 5, 0, 1]
    seen = mark_seen(NOTHING, jnp.asarray(TOKENS), jnp.int32(lengths))
    drawn = jnp.full((ROWS, 1), 7, jnp.int32)
    more = mark_seen(seen, drawn, jnp.int32([1, 0, 1, 0]))
    for row, length in enumerate(lengths):
        expected = set(TOKENS[row, :length])
        assert set(np.flatnonzero(seen[row])) == expected
        expected |= {7} if row in (0, 2) else set()
        assert set(np.flatnonzero(more[row])) == expected


def test_penalty_by_hand():
    seen = jnp.array([[True, True, False, False, True]])
    found = penalized(jnp.float32([[2, -2, 4, -4, 0]]), seen, jnp.float32([2]))
    np.testing.assert_array_equal(found, [[1, -4, 4, -4, 0]])


@pytest.mark.filterwarnings("default")  # torch's own
def test_penalty_is_that_of_transformers():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers")
    seen = mark_seen(NOTHING, jnp.asarray(TOKENS), jnp.full((ROWS,), 12, jnp.int32))
    found = jax.jit(penalized)(LOGITS, seen, PENALTIES)
    ids, scores = torch.from_numpy(TOKENS).long(), torch.from_numpy(LOGITS)
    for row, penalty in enumerate(PENALTIES.tolist()):
        theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        wanted = theirs(ids[row : row + 1], scores[row : row + 1]).numpy()[0]
        np.testing.assert_allclose(found[row], wanted, rtol=1e-6)
        assert (np.abs(wanted - LOGITS[row]).max() > 0.1) == (penalty != 1)


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB])
def test_logprobs_are_those_of_a_float64_softmax(count):
    wide = LOGITS.astype(np.float64)
    exact = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    order = np.argsort(-exact, axis=-1)[:, :count]
    token = jnp.int32([3, 0, VOCAB - 1, 7])
    chosen, ids, best = top_logprobs(jnp.asarray(LOGITS), token, count)
    np.testing.assert_allclose(chosen, exact[np.arange(ROWS), token], rtol=1e-5)
    np.testing.assert_array_equal(ids, order)
    top = np.take_along_axis(exact, order, axis=1)
    np.testing.assert_allclose(best, top, rtol=1e-5, atol=1e-6)


def test_logprobs_of_logits_too_large_for_their_exponentials():
    logits, token = jnp.float32([[1e4, 0, -1e4]]), jnp.int32([1])
    chosen, ids, best = top_logprobs(logits, token, 2)
    np.testing.assert_array_equal(chosen, [-1e4])
    np.testing.assert_array_equal(ids, [[0, 1]])
    np.testing.assert_array_equal(best, [[0, -1e4]])
