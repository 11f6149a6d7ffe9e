"""Sampling against plain probability, and its independence of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import generate
from kvjax.engine.sampling import Sampling, requests_of, sample

LOGITS = np.log([0.4, 0.3, 0.15, 0.1, 0.05]).astype(np.float32)


def frequencies(how, draws=4000):
    keys = jax.random.split(jax.random.key(1), draws)
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (draws, 5))
    requests = requests_of([how] * draws, draws)
    tokens = sample(logits, requests, keys, jnp.zeros((draws,), jnp.int32))
    return np.bincount(tokens, minlength=5) / draws


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Sampling(), [1, 0, 0, 0, 0]),
        (Sampling(temperature=1.0), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (Sampling(temperature=0.5), np.square([8, 6, 3, 2, 1]) / 114),
        (Sampling(temperature=1.0, top_k=2), [4 / 7, 3 / 7, 0, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.65), [4 / 7, 3 / 7, 0, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.75), [8 / 17, 6 / 17, 3 / 17, 0, 0]),
        (Sampling(temperature=1.0, top_p=1e-6), [1, 0, 0, 0, 0]),
        (Sampling(temperature=1.0, top_k=9), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (Sampling(temperature=1.0, min_p=0.3), [8 / 17, 6 / 17, 3 / 17, 0, 0]),
        (Sampling(temperature=0.5, min_p=0.3), [16 / 25, 9 / 25, 0, 0, 0]),
        (Sampling(temperature=1.0, min_p=1.0), [1, 0, 0, 0, 0]),
    ],
)
def test_frequencies(how, expected):
    np.testing.assert_allclose(frequencies(how), expected, atol=0.03)
    assert (frequencies(how)[np.asarray(expected) == 0] == 0).all()


@pytest.mark.parametrize("temperature", [1e-37, 1e-40])
def test_what_is_too_small_to_divide_by_is_greedy(temperature):
    """The quotients of several logits would be infinite, and all as likely."""
    logits, keys = (
        jnp.float32([[-50, 60, 40, 61]]),
        jax.random.split(jax.random.key(0), 1),
    )
    position = jnp.zeros((1,), jnp.int32)
    requests = requests_of([Sampling(temperature=temperature)], 1)
    assert sample(logits, requests, keys, position) == 3


def test_a_prompt_draws_the_same_in_any_batch(tiny):
    """By its number in the run and the seed, not by its row or its neighbours."""
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    options = {"temperature": 1.0, "max_new_tokens": 12}
    together = [c.tokens for c in generate(tiny, prompts, seed=3, **options)]
    again = [c.tokens for c in generate(tiny, prompts, seed=3, **options)]
    other = [c.tokens for c in generate(tiny, prompts, seed=4, **options)]
    (first,) = generate(tiny, prompts[:1], seed=3, **options)
    assert together == again != other
    assert first.tokens == together[0]
    same = generate(tiny, [prompts[0], prompts[0]], seed=3, **options)
    assert same[0].tokens != same[1].tokens, "each prompt draws its own"
