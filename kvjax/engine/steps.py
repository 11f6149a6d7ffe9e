"""The steps of generation over a whole model, one jitted program each.

::

    prompts -> prefill -> compact -> begin -> insert -> decode ... -> tokens
               KVState    KVState    DecodeState (rows of a pool)

`kvjax.engine.scoring` reads given tokens instead of drawing them.

Prompts are read in chunks of p tokens. Every row stops at its own length, so a ragged
batch gives what each prompt gives alone. `decode` resumes from the state that it
returned. `kvjax.engine.layerwise` runs the same steps with one program per layer.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import sharded
from kvjax.cache.spec import CacheSpec
from kvjax.engine.sampling import TokenSampler, sample
from kvjax.models import decoder
from kvjax.parallel import axes
from kvjax.types import ModelSpec, PyTree, Struct

NO_EOS = (-1,)  # no token ends a row
GREEDY = TokenSampler()


class DecodeState(Struct):
    """The state of a batch between two decode steps.

    Attributes:
      cache: KV pairs of all tokens but each row's last one, which is not read yet.
      token: i32[B], the last token drawn.
      done: bool[B], rows that have ended or are not in use.
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
    """Reads the prompts chunk by chunk, and evicts in between if the schedule does.

    The loop runs as many chunks as the longest prompt needs, whatever T is. If the
    state's capacity does not depend on T, one program serves prompts of every length.

    Args:
      params: the model's weights, see `with_policy`.
      state: the state to append to; donated.
      tokens: prompts, left-aligned; tokens beyond a row's length are never read.
      lengths: tokens per row; 0 for a row that is not in use.
      spec: the model's shape.
      config: configuration of the cache.

    Returns:
      The state, and the float32 logits that follow each row's last token.
    """
    chunk, first = config.schedule.prefill_chunk, config.first_chunk
    last_place = tokens.shape[1] - 1  # pads the last chunk

    def read(i, carry, width=chunk):
        state, last = carry
        start = jnp.where(i > 0, first + (i - 1) * chunk, 0)
        places = jnp.minimum(start + jnp.arange(width), last_place)
        block = jnp.take(tokens, places, axis=1)
        n = jnp.clip(lengths - start, 0, jnp.where(i > 0, chunk, first))
        hidden, state = forward(params, spec, block, n, state, config, is_prefill=True)
        return state, last_hidden(hidden, n, last)

    chunks = (jnp.max(lengths) + chunk - first + chunk - 1) // chunk
    hidden = jnp.zeros((tokens.shape[0], spec.model_dim), params["embed"].dtype)
    carry = state, hidden
    unrolled = first > chunk  # a first chunk of another width is outside of the loop
    if unrolled:
        carry = read(0, carry, min(first, tokens.shape[1]))
    state, hidden = jax.lax.fori_loop(int(unrolled), chunks, read, carry)
    logits = decoder.logits(params, hidden, spec)
    return state, axes.constrain(logits, "batch")


def last_hidden(
    hidden: Float[Array, "B T M"], n: Int[Array, "B"], before: Float[Array, "B M"]
) -> Float[Array, "B M"]:
    """Returns each row's last of n real tokens; `before` for rows that have none."""
    end = jnp.maximum(n - 1, 0)[:, None, None]
    last = jnp.take_along_axis(hidden, end, axis=1)[:, 0]
    return jnp.where((n > 0)[:, None], last, before)


@functools.partial(jax.jit, static_argnames=("spec", "config", "capacity"))
def compact(
    state: cache.KVState,
    policy_params: PyTree = None,
    *,
    spec: ModelSpec,
    config: CacheSpec,
    capacity: tuple[int, ...],
) -> cache.KVState:
    """Evicts between prefill and decode, see `kvjax.cache.eviction.compact`.

    The state is not donated, because the result's buffers have another size.
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
      sampling: how tokens are drawn.
      eos: tokens that end a row; `NO_EOS` for runs of fixed length.
    """
    none = jnp.zeros_like(active, jnp.int32)
    begun = DecodeState(state, none, ~active, none, keys)
    return next_token(begun, logits, state.next_pos, sampling=sampling, eos=eos)[0]


def next_token(
    state: DecodeState,
    logits: Float[Array, "B V"],
    position: Int[Array, "B"],
    *,
    sampling: TokenSampler,
    eos: tuple[int, ...],
) -> tuple[DecodeState, Int[Array, "B"]]:
    """Draws a token for every row that is not done.

    Args:
      state: its `cache` is returned unchanged.
      logits: those that follow each row's last token.
      position: of the token to draw.
      sampling: how tokens are drawn.
      eos: tokens that end a row.

    Returns:
      The state, and the tokens drawn; -1 for rows that were done.
    """
    token = sample(logits, sampling, state.keys, position)
    drawn = state.replace(
        token=token,
        done=state.done | _ends(token, eos),
        step=state.step + (~state.done).astype(jnp.int32),
    )
    return drawn, jnp.where(state.done, -1, token)


@functools.partial(jax.jit, donate_argnames=("pool",))
def insert(pool: DecodeState, part: DecodeState, rows: Int[Array, "N"]) -> DecodeState:
    """Writes the rows of `part` to these rows of the pool, which is donated.

    Rows of B or more are dropped. `part` stays valid: it may be inserted again.
    """
    put = lambda mine, new: mine.at[rows].set(new, mode="drop")
    rest = jax.tree.map(put, pool.replace(cache=()), part.replace(cache=()))
    return rest.replace(cache=cache.insert(pool.cache, part.cache, rows))


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

    Stops early when all rows are done. A row that is done reads and writes nothing.

    Args:
      params: the model's weights, see `with_policy`.
      state: the state to continue from; donated.
      limit: the most tokens to draw; None for N.
      spec: the model's shape.
      config: configuration of the cache.
      steps: N, the width of the output.
      sampling: how tokens are drawn.
      eos: tokens that end a row.

    Returns:
      The state, and the tokens drawn; -1 beyond a row's end.
    """

    def step(carry):
        i, state, out = carry
        n = (~state.done).astype(jnp.int32)
        hidden, kv = forward(params, spec, state.token[:, None], n, state.cache, config)
        logits = decoder.logits(params, hidden[:, 0], spec)
        state, token = next_token(
            state.replace(cache=kv), logits, kv.next_pos, sampling=sampling, eos=eos
        )
        return i + 1, state, out.at[:, i].set(token)

    limit = jnp.int32(steps) if limit is None else limit
    out = jnp.full((state.token.shape[0], steps), -1, jnp.int32)
    unfinished = lambda carry: (carry[0] < limit) & ~jnp.all(carry[1].done)
    _, state, out = jax.lax.while_loop(unfinished, step, (jnp.int32(0), state, out))
    return state, out


def forward(
    params: PyTree,
    spec: ModelSpec,
    tokens: Int[Array, "B T"],
    n: Int[Array, "B"],
    state: cache.KVState,
    config: CacheSpec,
    is_prefill: bool = False,
) -> tuple[Float[Array, "B T M"], cache.KVState]:
    """Runs the model over T new tokens, of which each row's first n are real."""
    positions = cache.next_positions(state, tokens.shape[1])
    learned = params.get("policy")
    state = sharded.evict_overflow(
        spec,
        state,
        tokens.shape[1],
        decoder.rotations(spec),
        config=config,
        n=n,
        is_prefill=is_prefill,
        policy_params=learned,
    )

    def attend(index, q, k, v, ops, state):
        return sharded.step_layer(
            spec,
            index,
            q,
            k,
            v,
            ops,
            state,
            config=config,
            n=n,
            tokens=tokens,
            is_prefill=is_prefill,
            policy_params=learned and learned[index],
            has_evicted=True,
        )

    measure = None
    if config.measures and is_prefill:
        measure = functools.partial(cache.measure, config=config, n=n)
    hidden, state = decoder.forward(
        params, spec, tokens, positions, state, attend, measure
    )
    return hidden, cache.advance(state, n)


def with_policy(params: PyTree, config: CacheSpec) -> PyTree:
    """Returns the weights, with those of a learned policy, if any, under `policy`.

    The policy's weights are one pytree per layer. They are arguments of the programs,
    not constants in them.
    """
    if not config.policy or config.policy.params is None:
        return params
    return params | {"policy": config.policy.params.layers}


def _ends(token: Int[Array, "B"], eos: tuple[int, ...]) -> Bool[Array, "B"]:
    ends = jnp.asarray(eos, jnp.int32)
    return jnp.any(token[:, None] == ends[None, :], axis=-1)
