"""A decode step and a prefill chunk of a whole model with a compressed cache."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache, policies
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import make_spec
from kvjax.engine.steps import forward
from kvjax.models import decoder, presets
from kvjax.types import ModelSpec

SPECS = {
    "smollm2-135m": ModelSpec(
        name="smollm2-135m",
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        model_dim=576,
        ff_dim=1536,
        vocab_size=49152,
        context_length=8192,
        rope_theta=1e5,
        norm_eps=1e-5,
        tie_embeddings=True,
    ),
    "llama-3.1-8b": presets.spec(
        "llama-3-8b"
    ),  # the same shapes but for a longer context
}


def batch_max(spec, slots, implementation=None):
    """Returns the cache of Batch-Max: average attention, 64 evictions at a time."""
    return make_spec(
        spec,
        policies.average_attention(),
        slots,
        Schedule("prefill_and_decode", 64, 64),
        implementation=implementation,
    )


def shapes(spec, config, rows):
    """Returns shapes of weights, state and last tokens, in bfloat16."""
    state, tokens = jax.eval_shape(lambda: nearly_full(spec, config, rows, 0))
    return decoder.param_shapes(spec, jnp.bfloat16), state, tokens


def step(params, state, tokens, *, spec, config):
    """Decodes one greedy token per row; returns the state and the tokens."""
    n = jnp.ones(tokens.shape, jnp.int32)
    hidden, state = forward(params, spec, tokens[:, None], n, state, config)
    return state, jnp.argmax(decoder.logits(params, hidden[:, 0], spec), -1).astype(
        jnp.int32
    )


def block(params, state, last, *, spec, config):
    """Reads one prefill chunk; returns the state and the tokens of the next chunk.

    Prefill computes no logits before the prompt's end, so the index of the largest
    feature of the last token stands for the token that fills the next chunk.
    """
    tokens = jnp.tile(last[:, None], config.schedule.prefill_chunk)
    n = jnp.full(last.shape, tokens.shape[1], jnp.int32)
    hidden, state = forward(params, spec, tokens, n, state, config, is_prefill=True)
    return state, jnp.argmax(hidden[:, -1], -1).astype(jnp.int32)


def timed(spec, rows, slots, steps, implementation, advance=step):
    """Returns the seconds of a step with full caches, and the bytes it reads.

    Weights are random. The caches start with `steps` free slots and evict on the way.
    `advance` is `step`, or `block` to prefill.
    """
    config = batch_max(spec, slots, implementation)
    params = decoder.random_params(spec, jax.random.key(0), jnp.bfloat16)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params, state, tokens):
        body = lambda i, carry: advance(params, *carry, spec=spec, config=config)
        return jax.lax.fori_loop(0, steps, body, (state, tokens))

    state, tokens = jax.jit(lambda: nearly_full(spec, config, rows, steps))()
    read = sum(x.nbytes for x in jax.tree.leaves((params["layers"], params["head"])))
    read += sum(leaf.nbytes for leaf in jax.tree.leaves(state.layers))
    state, tokens = run(params, state, tokens)
    jax.block_until_ready(tokens)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        state, tokens = run(params, state, tokens)
        jax.block_until_ready(tokens)
        times.append((time.perf_counter() - started) / steps)
    return float(np.median(times)), read


def nearly_full(spec, config, rows, free, dtype="bfloat16"):
    """Returns caches of random KV pairs with `free` empty slots per head."""
    capacity = config.decode_capacity(spec, 0, free)
    state = cache.init(spec, config, rows, capacity, jnp.dtype(dtype))

    def fill(index, layer):
        keys = jax.random.split(jax.random.key(index))
        shape = *layer.positions.shape, spec.head_dim
        k, v = (jax.random.normal(key, shape, dtype) for key in keys)
        k, v = layer.codec.key.encode(k), layer.codec.value.encode(v)
        slot = jnp.arange(layer.positions.shape[2], dtype=jnp.int32)
        held = jnp.where(slot < slot.size - free, slot, -1)[None, None]
        positions = jnp.broadcast_to(held, layer.positions.shape)
        return layer.replace(k=k, v=v, positions=positions)

    layers = tuple(fill(i, layer) for i, layer in enumerate(state.layers))
    filled = jnp.full((rows,), max(capacity) - free, jnp.int32)
    return state.replace(layers=layers, next_pos=filled), jnp.zeros((rows,), jnp.int32)
