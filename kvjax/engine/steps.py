"""The loops, one jitted program each, with the state donated.

::

    prompts   -> prefill -> compact -> begin -> insert -> decode ... -> tokens
                 KVState    KVState    DecodeState (rows of a pool)
    given tokens           -> score -> their probabilities

A prompt is read in blocks of p tokens; every row stops at its own length, so a ragged
batch gives what each prompt gives alone. A decode that stops goes on from its state.
"""

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import sharded
from kvjax.cache.spec import CacheSpec
from kvjax.engine.sampling import TokenSampler, sample
from kvjax.models import decoder
from kvjax.parallel import axes
from kvjax.types import ModelSpec, PyTree

NO_EOS = (-1,)  # no token ends a row
GREEDY = TokenSampler()
_AT_ONCE = 16  # given tokens fed at a time where nothing is evicted any more


@flax.struct.dataclass
class DecodeState:
    """Where the decoding of a batch stands.

    Attributes:
      cache: what the rows remember; it has not seen their last tokens.
      token: i32[B], the last token drawn.
      done: bool[B], rows that draw no more: ended, or not in use.
      step: i32[B], tokens drawn so far, the end token included.
      keys: PRNG keys [B], one per row.
    """

    cache: cache.KVState
    token: Array
    done: Array
    step: Array
    keys: Array


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
    config: CacheSpec,
) -> tuple[cache.KVState, Float[Array, "B V"]]:
    """Reads the prompts block by block, evicting on the way if the schedule says so.

    The loop runs as many blocks as the longest prompt needs, whatever T is: with a
    state of fixed capacity one program serves prompts of every length.

    Args:
      params: the model's weights, see `with_policy`.
      state: the state to append to; donated.
      tokens: prompts, left-aligned; what lies beyond a row's length is never read.
      lengths: tokens per row; 0 for a row that is not in use.
      spec: the model's shape.
      config: what is kept.

    Returns:
      The state, and the float32 logits that follow each row's last token.
    """
    block, first = config.schedule.prefill_chunk, config.first_chunk
    last_place = tokens.shape[1] - 1  # stands for what the last block lacks

    def read(i, carry, width=block):
        state, last = carry
        start = jnp.where(i > 0, first + (i - 1) * block, 0)
        places = jnp.minimum(start + jnp.arange(width), last_place)
        part = jnp.take(tokens, places, axis=1)
        n = jnp.clip(lengths - start, 0, jnp.where(i > 0, block, first))
        hidden, state = forward(params, spec, part, n, state, config, is_prefill=True)
        end = jnp.maximum(n - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(hidden, end, axis=1)[:, 0]
        return state, jnp.where((n > 0)[:, None], newest, last)

    blocks = (jnp.max(lengths) + block - first + block - 1) // block
    hidden = jnp.zeros((tokens.shape[0], spec.model_dim), params["embed"].dtype)
    carry, begun = (state, hidden), first > block  # a long block is another program
    if begun:
        carry = read(0, carry, min(first, tokens.shape[1]))
    state, hidden = jax.lax.fori_loop(int(begun), blocks, read, carry)
    logits = decoder.logits(params, hidden, spec)
    return state, axes.constrain(logits, "batch")


@functools.partial(jax.jit, static_argnames=("spec", "config", "capacity"))
def compact(
    state: cache.KVState,
    policy_params: PyTree = None,
    *,
    spec: ModelSpec,
    config: CacheSpec,
    capacity: tuple[int, ...],
) -> cache.KVState:
    """`sharded.compact`, the step between prefill and decode.

    The state is not donated: its buffers have another size than the result's.
    """
    ropes = decoder.rotations(spec)
    return sharded.compact(spec, state, config, capacity, ropes, policy_params)


@functools.partial(
    jax.jit, static_argnames=("sampling", "eos"), donate_argnames=("state",)
)
def begin(
    state: cache.KVState,
    logits: Float[Array, "B V"],
    active: Bool[Array, "B"],
    keys: Array,
    *,
    sampling: TokenSampler = GREEDY,
    eos: tuple[int, ...] = NO_EOS,
) -> DecodeState:
    """Draws every row's first token.

    Args:
      state: after the prompt; donated.
      logits: those that follow each row's last token.
      active: False for a row that is not in use.
      keys: PRNG keys [B], one per row.
      sampling: the rule.
      eos: tokens that end a row; `NO_EOS` for runs of fixed length.
    """
    token = sample(logits, sampling, keys, state.next_pos)
    done = ~active | _ends(token, eos)
    return DecodeState(state, token, done, active.astype(jnp.int32), keys)


@functools.partial(jax.jit, donate_argnames=("pool",))
def insert(pool: DecodeState, part: DecodeState, row: Int[Array, ""]) -> DecodeState:
    """`part` in the pool's rows from `row` on; the pool is donated."""

    def put(whole, part):
        return jax.lax.dynamic_update_slice_in_dim(whole, part, row, axis=0)

    rest = jax.tree.map(put, pool.replace(cache=()), part.replace(cache=()))
    return rest.replace(cache=cache.insert(pool.cache, part.cache, row))


@functools.partial(
    jax.jit,
    static_argnames=("spec", "config", "steps", "sampling", "eos"),
    donate_argnames=("state",),
)
def decode(
    params: PyTree,
    state: DecodeState,
    limit: Int[Array, ""] | None = None,
    *,
    spec: ModelSpec,
    config: CacheSpec,
    steps: int,
    sampling: TokenSampler = GREEDY,
    eos: tuple[int, ...] = NO_EOS,
) -> tuple[DecodeState, Int[Array, "B N"]]:
    """Draws up to `steps` more tokens per row on the device.

    Ends early when all rows are done. A row that has drawn an end token stays as it is:
    it appends nothing to its cache.

    Args:
      params: the model's weights, see `with_policy`.
      state: where decoding stands; donated.
      limit: the most tokens to draw; None for N.
      spec: the model's shape.
      config: what is kept.
      steps: N, the most that there is room for.
      sampling: the rule.
      eos: tokens that end a row.

    Returns:
      The state, and the tokens drawn; -1 beyond a row's end.
    """

    def step(carry):
        i, state, out = carry
        n = (~state.done).astype(jnp.int32)
        hidden, kv = forward(params, spec, state.token[:, None], n, state.cache, config)
        logits = decoder.logits(params, hidden[:, 0], spec)
        token = sample(logits, sampling, state.keys, kv.next_pos)
        out = out.at[:, i].set(jnp.where(state.done, -1, token))
        done = state.done | _ends(token, eos)
        return i + 1, DecodeState(kv, token, done, state.step + n, state.keys), out

    limit = jnp.int32(steps) if limit is None else limit
    out = jnp.full((state.token.shape[0], steps), -1, jnp.int32)
    going = lambda carry: (carry[0] < limit) & ~jnp.all(carry[1].done)
    _, state, out = jax.lax.while_loop(going, step, (jnp.int32(0), state, out))
    return state, out


class Scores(NamedTuple):
    """How likely given tokens are.

    Attributes:
      logprob: natural logarithm of each token's probability.
      greedy: whether the token was the likeliest.
      logits: float32, those that each token was judged by, if they were asked for.
    """

    logprob: Float[Array, "B N"]
    greedy: Bool[Array, "B N"]
    logits: Float[Array, "N B V"] | None


@functools.partial(jax.jit, static_argnames=("spec", "config", "keep_logits"))
def score(
    params: PyTree,
    state: cache.KVState,
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    spec: ModelSpec,
    config: CacheSpec,
    keep_logits: bool = False,
) -> tuple[cache.KVState, Scores]:
    """Teacher forcing: how likely given continuations are.

    Tokens are fed one at a time, as decoding would, or some at once where that is the
    same: the schedule has nothing left to evict, no codec leaves the newest pairs as
    they were, and nobody wants the logits; never more than a block of the prompt, for
    which there is room. A row that is at its end feeds nothing more. The state is not
    donated: several continuations may follow one prompt.

    Args:
      params: the model's weights, see `with_policy`.
      state: the state after the prompt.
      logits: those that follow each row's last token.
      tokens: continuations, left-aligned.
      lengths: tokens per row; 0 for a row that has none.
      spec: the model's shape.
      config: what is kept.
      keep_logits: whether to return them all; a batch of large ones.

    Returns:
      The state (which has not seen the last token), and the scores; beyond a row's
      length 0 and True.
    """
    batch, most = tokens.shape
    layers = range(spec.num_layers)
    newest = any(config.codec_of(index).residual_length for index in layers)
    one = config.schedule.evicts_in_decode or newest or keep_logits
    width = 1 if one else min(_AT_ONCE, most, config.schedule.prefill_chunk)
    steps = jnp.maximum(jnp.max(lengths) - 1 + width - 1, 0) // width
    room = -most % width + width  # for the last step's targets, one token ahead
    padded = jnp.pad(tokens, ((0, 0), (0, room)))

    def judge(logits, targets):
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        found = chosen - jax.nn.logsumexp(logits, axis=-1), likeliest == targets
        return (*found, logits) if keep_logits else found

    def step(i, carry):
        state, kept = carry
        part = jax.lax.dynamic_slice_in_dim(padded, i * width, width, axis=1)
        targets = jax.lax.dynamic_slice_in_dim(padded, i * width + 1, width, axis=1)
        n = jnp.clip(lengths - 1 - i * width, 0, width)
        hidden, state = forward(params, spec, part, n, state, config)
        flat = decoder.logits(params, hidden.reshape(-1, hidden.shape[-1]), spec)
        found = judge(flat.reshape(batch, width, -1), targets)
        put = lambda all, new: jax.lax.dynamic_update_slice_in_dim(
            all, new, i * width + 1, axis=1
        )
        return state, jax.tree.map(put, kept, found)

    def first(found):
        empty = jnp.zeros((batch, padded.shape[1], *found.shape[2:]), found.dtype)
        return empty.at[:, :1].set(found)

    kept = jax.tree.map(first, judge(logits[:, None], tokens[:, :1]))
    state, kept = jax.lax.fori_loop(0, steps, step, (state, kept))
    logprob, greedy, *rest = (found[:, :most] for found in kept)
    real = jnp.arange(most, dtype=jnp.int32)[None, :] < lengths[:, None]
    every = jnp.swapaxes(rest[0], 0, 1) if keep_logits else None
    return state, Scores(jnp.where(real, logprob, 0.0), greedy | ~real, every)


def forward(
    params: PyTree,
    spec: ModelSpec,
    tokens: Int[Array, "B T"],
    n: Int[Array, "B"],
    state: cache.KVState,
    config: CacheSpec,
    is_prefill: bool = False,
) -> tuple[Float[Array, "B T M"], cache.KVState]:
    """T new tokens through the model, of which each row's first n are real."""
    positions = cache.next_positions(state, tokens.shape[1])
    learned = params.get("policy")
    state = sharded.make_room(
        *(spec, state, tokens.shape[1], decoder.rotations(spec)),
        config=config,
        n=n,
        is_prefill=is_prefill,
        policy_params=learned,
    )

    def attend(index, q, k, v, ops, state):
        return sharded.step_layer(
            *(spec, index, q, k, v, ops, state),
            config=config,
            n=n,
            tokens=tokens,
            is_prefill=is_prefill,
            policy_params=learned and learned[index],
            has_room=True,
        )

    measure = None
    if config.measures and is_prefill:
        measure = functools.partial(cache.measure, config=config, n=n)
    hidden, state = decoder.forward(
        params, spec, tokens, positions, state, attend, measure
    )
    return hidden, cache.advance(state, n)


def with_policy(params: PyTree, config: CacheSpec) -> PyTree:
    """The model's weights, with those of a learned rule, if it has any, as `policy`.

    They go through programs side by side: traced, one pytree per layer.
    """
    if not config.policy or config.policy.params is None:
        return params
    return params | {"policy": config.policy.params.layers}


def _ends(token: Int[Array, "B"], eos: tuple[int, ...]) -> Bool[Array, "B"]:
    ends = jnp.asarray(eos, jnp.int32)
    return jnp.any(token[:, None] == ends[None, :], axis=-1)
