"""Documents read and compressed, and rows that go on after them with questions."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache
from kvjax.cache.prefix import Prefix, after, rows_config
from kvjax.engine import steps
from kvjax.engine.forward import forward, with_policy
from kvjax.models import decoder


class Answers(NamedTuple):
    """Of every row: logits [N, B, V] and tokens [N, B], drawn greedily."""

    logits: np.ndarray
    tokens: np.ndarray
    state: cache.KVState


def read(model, config, documents, new):
    """The KV state of documents [S, T], with slots for `new` more tokens."""
    spec = model.spec
    tokens = jnp.asarray(documents, jnp.int32)
    count, length = tokens.shape
    sizes = length, new
    capacity = config.prefill_capacity(spec, *sizes)
    state = cache.init(spec, config.reading, count, capacity)
    lengths = jnp.full((count,), length, jnp.int32)
    params = with_policy(model.params, config)
    how = {"spec": spec, "config": config.reading}
    state = steps.prefill(params, state, tokens, lengths, **how)[0]
    if not config.compacts:
        return state
    capacity = config.decode_capacity(spec, *sizes)
    return steps.compact(state, spec=spec, config=config, capacity=capacity)


@functools.partial(jax.jit, static_argnames=("spec", "config", "count"))
def _go_on(params, state, tokens, lengths, prefix, *, spec, config, count):
    run = functools.partial(forward, params, spec)
    hidden, state = run(tokens, lengths, state, config, is_prefill=True, prefix=prefix)
    last = steps.last_hidden(hidden, lengths, hidden[:, 0])
    one = jnp.ones_like(lengths)

    def step(carry, _):
        state, last = carry
        logits = decoder.logits(params, last, spec)
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        hidden, state = run(token[:, None], one, state, config, prefix=prefix)
        return (state, hidden[:, 0]), (logits, token)

    (state, _), (logits, drawn) = jax.lax.scan(step, (state, last), None, count)
    return logits, drawn, state


def go_on(model, config, state, questions, lengths, count, prefix=None) -> Answers:
    """Reads questions [B, T], keeps all of their pairs, and draws `count` tokens."""
    params = with_policy(model.params, config)
    tokens, lengths = (jnp.asarray(x, jnp.int32) for x in (questions, lengths))
    found = _go_on(
        params,
        state,
        tokens,
        lengths,
        prefix,
        spec=model.spec,
        config=config,
        count=count,
    )
    cache.raise_errors(found[2])
    return Answers(*jax.device_get(found[:2]), found[2])


def folded(model, config, state, questions, lengths, count) -> Answers:
    """The same after a shared prefix: rows attend to it, and hold their own pairs."""
    prefix, own = Prefix(state, config), rows_config(config)
    rows, width = np.shape(questions)
    capacity = own.decode_capacity(model.spec, width, count)
    empty = after(prefix, cache.init(model.spec, own, rows, capacity))
    return go_on(model, own, empty, questions, lengths, count, prefix)


def copied(model, config, state, questions, lengths, count) -> Answers:
    """The same without sharing: every row has a copy of its document's pairs."""
    rows = len(questions) // len(state.next_pos)
    copies = jax.tree.map(lambda leaf: jnp.repeat(leaf, rows, axis=0), state)
    return go_on(model, config, copies, questions, lengths, count)
