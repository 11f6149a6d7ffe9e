"""The loops: prefill, decode, and teacher forcing.

`prefill` and `decode` are one jitted program each, with the KV state donated. A prompt
is read in blocks of p tokens; every row stops at its own length, so a ragged batch
gives what each prompt gives alone.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import sharded
from kvjax.cache.config import CacheConfig
from kvjax.engine import sampling
from kvjax.models import decoder
from kvjax.parallel import axes
from kvjax.types import ModelSpec, PyTree

NO_EOS = (-1,)  # no token ends a row
GREEDY = sampling.Sampling()
_AT_ONCE = 16  # given tokens fed at a time where nothing is evicted any more


@functools.partial(
    jax.jit, static_argnames=("spec", "config"), donate_argnames=("state",)
)
def prefill(
    params: PyTree,
    state: cache.KVState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    *,
    spec: ModelSpec,
    config: CacheConfig,
) -> tuple[cache.KVState, Float[Array, "B V"]]:
    """Reads the prompts block by block, evicting on the way if the schedule says so.

    The loop runs as many blocks as the longest prompt needs, whatever T is: with a
    state of fixed capacity one program serves prompts of every length.

    Args:
      params: the model's weights.
      state: the state to append to; donated.
      tokens: prompts, left-aligned; what lies beyond a row's length is never read. T is
        a multiple of the schedule's block.
      lengths: tokens per row; 0 for a row that is not in use.
      spec: the model's shape.
      config: what is kept.

    Returns:
      The state, and the float32 logits that follow each row's last token.
    """
    block = config.schedule.prefill_chunk
    if tokens.shape[1] % block:
        raise ValueError(f"T={tokens.shape[1]} is not a multiple of the block {block}")

    def read(i, carry):
        state, last = carry
        part = jax.lax.dynamic_slice_in_dim(tokens, i * block, block, axis=1)
        n = jnp.clip(lengths - i * block, 0, block)
        hidden, state = forward(params, spec, part, n, state, config, prompt=True)
        end = jnp.maximum(n - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(hidden, end, axis=1)[:, 0]
        return state, jnp.where((n > 0)[:, None], newest, last)

    blocks = (jnp.max(lengths) + block - 1) // block
    hidden = jnp.zeros((tokens.shape[0], spec.model_dim), params["embed"].dtype)
    state, hidden = jax.lax.fori_loop(0, blocks, read, (state, hidden))
    logits = decoder.logits(params, hidden, spec)
    return state, axes.constrain(logits, "batch")


@functools.partial(
    jax.jit,
    static_argnames=("spec", "config", "steps", "how", "eos"),
    donate_argnames=("state",),
)
def decode(
    params: PyTree,
    state: cache.KVState,
    logits: Float[Array, "B V"],
    active: Array,
    keys: Array,
    limit: Int[Array, ""] | None = None,
    *,
    spec: ModelSpec,
    config: CacheConfig,
    steps: int,
    how: sampling.Sampling = GREEDY,
    eos: tuple[int, ...] = NO_EOS,
) -> tuple[cache.KVState, Int[Array, "B N"], Int[Array, "B"]]:
    """Generates up to `steps` tokens per row on the device.

    Ends early when no row is active. A row that has drawn an end token stays as it is:
    it appends nothing to its cache.

    Args:
      params: the model's weights.
      state: the state after the prompt; donated.
      logits: those that follow each row's last token.
      active: bool[B], False for a row that is not in use.
      keys: PRNG keys [B], one per row.
      limit: the most tokens to generate; None for N.
      spec: the model's shape.
      config: what is kept.
      steps: N, the most that there is room for.
      how: the sampling rule.
      eos: tokens that end a row; `NO_EOS` for runs of fixed length.

    Returns:
      The state (which has not seen the last token), the tokens (-1 beyond a row's
      end), and how many tokens each row has, its end token included.
    """
    ends = jnp.asarray(eos, jnp.int32)

    def draw(logits, state, active, out, i):
        token = sampling.sample(logits, how, keys, state.next_pos)
        out = out.at[:, i].set(jnp.where(active, token, -1))
        ended = jnp.any(token[:, None] == ends[None, :], axis=-1)
        return token, active & ~ended, out

    def step(carry):
        i, state, token, active, out, count = carry
        n = active.astype(jnp.int32)
        hidden, state = forward(params, spec, token[:, None], n, state, config)
        logits = decoder.logits(params, hidden[:, 0], spec)
        token, active, out = draw(logits, state, active, out, i)
        return i + 1, state, token, active, out, count + n

    limit = jnp.int32(steps) if limit is None else limit
    out = jnp.full((active.shape[0], steps), -1, jnp.int32)
    count = active.astype(jnp.int32)
    token, active, out = draw(logits, state, active, out, 0)
    carry = (jnp.int32(1), state, token, active, out, count)
    carry = jax.lax.while_loop(
        lambda carry: (carry[0] < limit) & jnp.any(carry[3]), step, carry
    )
    return carry[1], carry[4], carry[5]


@functools.partial(
    jax.jit, static_argnames=("spec", "config"), donate_argnames=("state",)
)
def score_tokens(
    params: PyTree,
    state: cache.KVState,
    tokens: Int[Array, "B T"],
    *,
    spec: ModelSpec,
    config: CacheConfig,
) -> tuple[cache.KVState, Float[Array, "T B V"]]:
    """Teacher forcing: feeds given tokens one at a time, as decoding would.

    Returns:
      The state, and the float32 logits that follow every token.
    """
    one = jnp.ones(tokens.shape[:1], jnp.int32)

    def step(state, token):
        hidden, state = forward(params, spec, token[:, None], one, state, config)
        return state, decoder.logits(params, hidden[:, 0], spec)

    return jax.lax.scan(step, state, tokens.T)


@functools.partial(jax.jit, static_argnames=("spec", "config"))
def score(
    params: PyTree,
    state: cache.KVState,
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    spec: ModelSpec,
    config: CacheConfig,
) -> tuple[cache.KVState, Float[Array, "B N"], Bool[Array, "B N"]]:
    """Teacher forcing: how likely given continuations are.

    Tokens are fed one at a time, as decoding would, or some at once where the schedule
    has nothing left to evict. A row that is at its end feeds nothing more. The state is
    not donated: several continuations may follow one prompt.

    Args:
      params: the model's weights.
      state: the state after the prompt.
      logits: those that follow each row's last token.
      tokens: continuations, left-aligned.
      lengths: tokens per row; 0 for a row that has none.
      spec: the model's shape.
      config: what is kept.

    Returns:
      The state (which has not seen the last token), the natural logarithm of each
      token's probability, and whether the token was the likeliest. Beyond a row's
      length 0 and True.
    """
    batch, most = tokens.shape
    width = 1 if config.schedule.evicts_in_decode else min(_AT_ONCE, most)
    steps = jnp.maximum(jnp.max(lengths) - 1 + width - 1, 0) // width
    room = -most % width + width  # for the last step's targets, one token ahead
    padded = jnp.pad(tokens, ((0, 0), (0, room)))

    def judge(logits, targets):
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return chosen - jax.nn.logsumexp(logits, axis=-1), likeliest == targets

    def step(i, carry):
        state, logprob, greedy = carry
        part = jax.lax.dynamic_slice_in_dim(padded, i * width, width, axis=1)
        targets = jax.lax.dynamic_slice_in_dim(padded, i * width + 1, width, axis=1)
        n = jnp.clip(lengths - 1 - i * width, 0, width)
        hidden, state = forward(params, spec, part, n, state, config)
        flat = decoder.logits(params, hidden.reshape(-1, hidden.shape[-1]), spec)
        found = judge(flat.reshape(batch, width, -1), targets)
        put = lambda all, new: jax.lax.dynamic_update_slice_in_dim(
            all, new, i * width + 1, axis=1
        )
        return state, put(logprob, found[0]), put(greedy, found[1])

    first = judge(logits, tokens[:, 0])
    carry = (
        state,
        jnp.zeros(padded.shape, jnp.float32).at[:, 0].set(first[0]),
        jnp.ones(padded.shape, jnp.bool).at[:, 0].set(first[1]),
    )
    state, logprob, greedy = jax.lax.fori_loop(0, steps, step, carry)
    real = jnp.arange(most, dtype=jnp.int32)[None, :] < lengths[:, None]
    logprob = jnp.where(real, logprob[:, :most], 0.0)
    return state, logprob, greedy[:, :most] | ~real


@functools.partial(jax.jit, static_argnames=("spec", "config", "capacity"))
def compact(
    state: cache.KVState,
    *,
    spec: ModelSpec,
    config: CacheConfig,
    capacity: tuple[int, ...],
) -> cache.KVState:
    """`sharded.compact`, jitted: the step between prefill and decode.

    The state is not donated: its buffers have another size than the result's.
    """
    return sharded.compact(spec, state, config, capacity, decoder.rotations(spec))


def forward(params, spec, tokens, n, state, config, prompt=False):
    """T new tokens through the model, of which each row's first n are real."""
    positions = cache.next_positions(state, tokens.shape[1])
    attend = functools.partial(
        sharded.step_layer, spec, config=config, n=n, tokens=tokens, prompt=prompt
    )
    hidden, state = decoder.forward(params, spec, tokens, positions, state, attend)
    return hidden, cache.advance(state, n)
