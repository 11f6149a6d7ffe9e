"""Batches run in one line, and the plain loop that teacher forcing is held against."""

import contextlib
import functools

import jax
import jax.numpy as jnp

from kvjax.engine import runner, steps
from kvjax.engine.forward import forward
from kvjax.engine.requests import Request
from kvjax.engine.sampling import Sampling, requests_of
from kvjax.models import decoder


def run_batch(params, job, prompts, prompt_ids, seed=0, **options):
    """A fixed batch, or a staggered one, on whole compiled programs."""
    whole = runner.Whole(params, job)
    return runner.run_batch(whole, prompts, prompt_ids, seed, **options)


def requests_for(job, prompts):
    """A greedy request for every prompt, of as many new tokens as the job has."""
    sampling = Sampling(max_new_tokens=job.max_new_tokens)
    return [Request(i, tuple(prompt), sampling) for i, prompt in enumerate(prompts)]


@functools.partial(jax.jit, static_argnames=("spec", "config"))
def score_tokens(params, state, tokens, *, spec, config):
    """Feeds tokens [B, T] one at a time; the state, and logits [T, B, V] after each."""
    one = jnp.ones(tokens.shape[:1], jnp.int32)

    def step(state, token):
        hidden, state = forward(params, spec, token[:, None], one, state, config)
        return state, decoder.logits(params, hidden[:, 0], spec)

    return jax.lax.scan(step, state, tokens.T)


@contextlib.contextmanager
def compilations():
    """A list with an entry for every program that JAX compiles meanwhile."""
    made = []

    def note(event, *_, **__):
        if "backend_compile" in event:
            made.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        jax.jit(lambda x: x + 1)(jnp.int32(1))
        assert made  # that is what JAX calls it
        made.clear()
        yield made
    finally:
        jax.monitoring.clear_event_listeners()


def decode(params, state, logits, active, keys, *, spec, config, count, **how):
    """First tokens and the others, [B, N], and the state of the cache at the end."""
    rows = len(active)
    requests = requests_of([Sampling(max_new_tokens=count)] * rows, rows)
    requests = requests.replace(left=jnp.where(active, requests.left, 0))
    begun, first = steps.begin(state, logits, requests, keys, **how)
    end, rest = steps.decode(
        params, begun, spec=spec, config=config, steps=count - 1, **how
    )
    return end.cache, jnp.concatenate([first.token[:, None], rest.token], axis=1)
