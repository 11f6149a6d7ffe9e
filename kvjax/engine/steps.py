"""The steps of generation over a whole model, one jitted program each.

::

    prompts -> prefill -> compact -> begin -> decode ... -> tokens      a fixed batch
               KVState    KVState    DecodeState

    prompts -> mixed ... -> compact -> insert -> decode ... -> tokens   rows of a pool
               Reading      KVState    DecodeState

`mixed` reads prompts and decodes the rows of a pool in the same forward passes.
`kvjax.engine.scoring` reads given tokens instead of drawing them.

Prompts are read in chunks of p tokens. Every row stops at its own length, so a ragged
batch gives what each prompt gives alone. `decode` resumes from the state that it
returned. `kvjax.engine.layerwise` runs the same steps with one program per layer.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import sharded
from kvjax.cache.prefix import Prefix
from kvjax.cache.spec import CacheSpec
from kvjax.engine.forward import Pass, forward, forward_both
from kvjax.engine.logits import mark_seen, penalized, top_logprobs
from kvjax.engine.sampling import Requests, SamplingSpec, Tokens, likeliest, sample
from kvjax.models import decoder
from kvjax.parallel import axes
from kvjax.types import ModelSpec, PyTree, Struct

NO_EOS = (-1,)  # no token ends a row
GREEDY = SamplingSpec()


class DecodeState(Struct):
    """The state of a batch between two decode steps.

    Attributes:
      cache: KV pairs of all tokens but each row's last one, which is not read yet.
      token: i32[B], the last token drawn.
      done: bool[B], rows that have ended or are not in use.
      keys: PRNG keys [B], one per row.
      requests: what each row generates.
      seen: bool[B, V], the tokens of each row's prompt and completion; None unless a
        request has a repetition penalty.
    """

    cache: cache.KVState
    token: Array
    done: Array
    keys: Array
    requests: Requests
    seen: Array | None = None


class Reading(Struct):
    """Prompts that are being read.

    Attributes:
      cache: KV pairs of the tokens read so far.
      hidden: [B, M], the final hidden state of each row's last token.
      chunk: i32[], chunks read so far.
    """

    cache: cache.KVState
    hidden: Array
    chunk: Array


@functools.partial(
    jax.jit, static_argnames=("spec", "config"), donate_argnames=("state",)
)
def prefill(
    params: PyTree,
    state: cache.KVState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    prefix: Prefix | None = None,
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
      prefix: what all rows go on after; None for nothing.
      spec: the model's shape.
      config: configuration of the cache.

    Returns:
      The state, and the float32 logits that follow each row's last token.
    """
    read = functools.partial(
        _read_chunk, params, prefix=prefix, spec=spec, config=config
    )
    reading = begin_reading(params, state, spec)
    unrolled = config.first_chunk > config.schedule.prefill_chunk
    if unrolled:  # a first chunk of another width is outside of the loop
        width = min(config.first_chunk, tokens.shape[1])
        reading = read(reading, tokens, lengths, width=width)
    reading = jax.lax.while_loop(
        lambda reading: reading.chunk < chunks(config, lengths),
        lambda reading: read(reading, tokens, lengths),
        reading,
    )
    return reading.cache, last_logits(params, reading.hidden, spec)


def begin_reading(params: PyTree, state: cache.KVState, spec: ModelSpec) -> Reading:
    """Returns the reading of prompts of which nothing has been read yet."""
    shape = len(state.next_pos), spec.model_dim
    hidden = jnp.zeros(shape, params["embed"].dtype)
    return Reading(state, hidden, jnp.int32(0))


def chunks(config: CacheSpec, lengths: Int[Array, "B"]) -> Int[Array, ""]:
    """Returns in how many chunks the longest prompt is read."""
    chunk, first = config.schedule.prefill_chunk, config.first_chunk
    return (jnp.max(lengths) + chunk - first + chunk - 1) // chunk


def last_logits(
    params: PyTree, hidden: Float[Array, "B M"], spec: ModelSpec
) -> Float[Array, "B V"]:
    """Returns the float32 logits that follow each row's last token."""
    return axes.constrain(decoder.logits(params, hidden, spec), "batch")


def _chunk_tokens(
    reading: Reading,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    config: CacheSpec,
    width: int,
) -> tuple[Int[Array, "B T"], Int[Array, "B"]]:
    """Returns the next T tokens of every prompt, and how many of them are real."""
    chunk, first = config.schedule.prefill_chunk, config.first_chunk
    i, last_place = reading.chunk, tokens.shape[1] - 1  # pads the last chunk
    start = jnp.where(i > 0, first + (i - 1) * chunk, 0)
    places = jnp.minimum(start + jnp.arange(width), last_place)
    n = jnp.clip(lengths - start, 0, jnp.where(i > 0, chunk, first))
    return jnp.take(tokens, places, axis=1), n


def _read_chunk(
    params: PyTree,
    reading: Reading,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    *,
    prefix: Prefix | None,
    spec: ModelSpec,
    config: CacheSpec,
    width: int | None = None,
) -> Reading:
    """Reads the next chunk of every prompt."""
    width = width or config.schedule.prefill_chunk
    block, n = _chunk_tokens(reading, tokens, lengths, config, width)
    hidden, state = forward(
        params,
        spec,
        block,
        n,
        reading.cache,
        config,
        is_prefill=True,
        prefix=prefix,
    )
    last = last_hidden(hidden, n, reading.hidden)
    return Reading(state, last, reading.chunk + 1)


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
    requests: Requests,
    keys: Array,
    seen: Bool[Array, "B V"] | None = None,
    *,
    sampling: SamplingSpec = GREEDY,
    eos: tuple[int, ...] = NO_EOS,
) -> tuple[DecodeState, Tokens]:
    """Draws every row's first token.

    Args:
      state: after the prompt; donated.
      logits: those that follow each row's last token.
      requests: what each row generates.
      keys: PRNG keys [B], one per row.
      seen: the prompts' tokens, see `DecodeState`.
      sampling: what the program is compiled for.
      eos: tokens that end a row, if its request says so.

    Returns:
      The state, and the tokens drawn; -1 for rows that are not in use.
    """
    none = jnp.zeros_like(requests.left)
    begun = DecodeState(state, none, requests.left < 1, keys, requests, seen)
    return next_token(begun, logits, state.next_pos, sampling=sampling, eos=eos)


def next_token(
    state: DecodeState,
    logits: Float[Array, "B V"],
    position: Int[Array, "B"],
    *,
    sampling: SamplingSpec,
    eos: tuple[int, ...],
) -> tuple[DecodeState, Tokens]:
    """Draws a token for every row that is not done.

    Args:
      state: its `cache` is returned unchanged.
      logits: those that follow each row's last token.
      position: of the token to draw.
      sampling: what the program is compiled for.
      eos: tokens that end a row, if its request says so.

    Returns:
      The state, and the tokens drawn; -1 for rows that were done.
    """
    requests, plain, seen = state.requests, logits, state.seen
    if seen is not None:
        logits = penalized(logits, seen, requests.repetition_penalty)
    if sampling.samples:
        token = sample(logits, requests, state.keys, position)
    else:
        token = likeliest(logits)
    live = (~state.done).astype(jnp.int32)
    left = requests.left - live
    after = state.replace(
        token=token,
        done=state.done | (left < 1) | (requests.ends & _ends(token, eos)),
        requests=requests.replace(left=left),
        seen=None if seen is None else mark_seen(seen, token[:, None], live),
    )
    drawn = Tokens(jnp.where(state.done, -1, token))
    if sampling.logprobs is not None:
        drawn = Tokens(drawn.token, *top_logprobs(plain, token, sampling.logprobs))
    return after, drawn


@functools.partial(
    jax.jit, static_argnames=("sampling", "eos"), donate_argnames=("pool",)
)
def insert(
    pool: DecodeState,
    state: cache.KVState,
    logits: Float[Array, "N V"],
    requests: Requests,
    keys: Array,
    rows: Int[Array, "N"],
    seen: Bool[Array, "N V"] | None = None,
    *,
    sampling: SamplingSpec = GREEDY,
    eos: tuple[int, ...] = NO_EOS,
) -> tuple[DecodeState, Tokens]:
    """Copies prompts that have been read to rows of the pool, and draws first tokens.

    Args:
      pool: B rows; donated.
      state: N rows, after the prompt. It stays valid: it may be inserted again.
      logits: those that follow the last tokens of these N rows.
      requests: what each of the N generates.
      keys: PRNG keys [N].
      rows: where each of the N is copied to; B or more drops it.
      seen: the prompts' tokens, see `DecodeState`.
      sampling: what the program is compiled for.
      eos: tokens that end a row, if its request says so.

    Returns:
      The pool, and the N tokens drawn.
    """
    begun = DecodeState(None, rows, requests.left < 1, keys, requests, seen)
    new, drawn = next_token(begun, logits, state.next_pos, sampling=sampling, eos=eos)
    put = lambda mine, new: mine.at[rows].set(new, mode="drop")
    rest = jax.tree.map(put, pool.replace(cache=None), new)
    return rest.replace(cache=cache.insert(pool.cache, state, rows)), drawn


@functools.partial(
    jax.jit,
    static_argnames=("spec", "config", "steps", "sampling", "eos"),
    donate_argnames=("state",),
)
def decode(
    params: PyTree,
    state: DecodeState,
    limit: Int[Array, ""] | None = None,
    until: Int[Array, ""] | None = None,
    prefix: Prefix | None = None,
    *,
    spec: ModelSpec,
    config: CacheSpec,
    steps: int,
    sampling: SamplingSpec = GREEDY,
    eos: tuple[int, ...] = NO_EOS,
) -> tuple[DecodeState, Tokens]:
    """Draws up to `steps` more tokens per row on the device.

    Stops early when all rows are done. A row that is done reads and writes nothing.

    Args:
      params: the model's weights, see `with_policy`.
      state: the state to continue from; donated.
      limit: the most tokens to draw; None for N.
      until: how many more rows may end before it stops; None for all.
      prefix: what all rows go on after; None for nothing.
      spec: the model's shape.
      config: configuration of the cache.
      steps: N, the width of the output.
      sampling: what the program is compiled for.
      eos: tokens that end a row, if its request says so.

    Returns:
      The state, and the tokens drawn, [B, N]; -1 beyond a row's end.
    """

    def step(carry):
        i, state, out = carry
        n = (~state.done).astype(jnp.int32)
        token = state.token[:, None]
        hidden, kv = forward(params, spec, token, n, state.cache, config, prefix=prefix)
        logits = decoder.logits(params, hidden[:, 0], spec)
        state, drawn = next_token(
            state.replace(cache=kv), logits, kv.next_pos, sampling=sampling, eos=eos
        )
        return i + 1, state, _recorded(out, i, drawn)

    going = _going(state, steps, limit, until)
    out = _no_tokens(len(state.done), steps, sampling)
    _, state, out = jax.lax.while_loop(
        lambda carry: going(*carry[:2]) & ~jnp.all(carry[1].done),
        step,
        (jnp.int32(0), state, out),
    )
    return state, out


@functools.partial(
    jax.jit,
    static_argnames=("spec", "config", "steps", "sampling", "eos", "groups"),
    donate_argnames=("state", "reading"),
)
def mixed(
    params: PyTree,
    state: DecodeState,
    reading: Reading,
    tokens: Int[Array, "N P"],
    lengths: Int[Array, "N"],
    limit: Int[Array, ""] | None = None,
    until: Int[Array, ""] | None = None,
    prefix: Prefix | None = None,
    *,
    spec: ModelSpec,
    config: CacheSpec,
    steps: int,
    sampling: SamplingSpec = GREEDY,
    eos: tuple[int, ...] = NO_EOS,
    groups: int = 1,
) -> tuple[DecodeState, Reading, Tokens]:
    """Decodes the rows of a pool and reads other prompts, in the same forward passes.

    Every step draws a token per row and reads a chunk of every prompt. The weights are
    read once for both. Stops when the prompts are in; see also `decode`. The tokens are
    those of `prefill` and `decode`.

    Args:
      params: the model's weights, see `with_policy`.
      state: B rows that decode; donated.
      reading: N prompts that are being read; donated.
      tokens: the prompts, left-aligned.
      lengths: tokens per prompt; 0 for a row that is not in use.
      limit: the most steps; None for `steps`.
      until: how many more rows may end before it stops; None for all.
      prefix: what all rows go on after; None for nothing.
      spec: the model's shape.
      config: configuration of the cache, whose first chunk is no wider than others.
      steps: the width of the output.
      sampling: what the program is compiled for.
      eos: tokens that end a row, if its request says so.
      groups: the device groups that rows and prompts are divided over.

    Returns:
      Both states, and the tokens drawn, [B, steps]; -1 beyond a row's end.
    """
    chunk = config.schedule.prefill_chunk

    def step(carry):
        i, state, reading, out = carry
        block, n = _chunk_tokens(reading, tokens, lengths, config, chunk)
        live = (~state.done).astype(jnp.int32)
        hidden, ends, kv, read = forward_both(
            params,
            spec,
            Pass(state.token[:, None], live, state.cache, False, prefix),
            Pass(block, n, reading.cache, True, prefix),
            config,
            groups,
        )
        logits = decoder.logits(params, hidden[:, 0], spec)
        state, drawn = next_token(
            state.replace(cache=kv), logits, kv.next_pos, sampling=sampling, eos=eos
        )
        reading = Reading(read, last_hidden(ends, n, reading.hidden), reading.chunk + 1)
        return i + 1, state, reading, _recorded(out, i, drawn)

    going, total = _going(state, steps, limit, until), chunks(config, lengths)
    out = _no_tokens(len(state.done), steps, sampling)
    _, state, reading, out = jax.lax.while_loop(
        lambda carry: going(*carry[:2]) & (carry[2].chunk < total),
        step,
        (jnp.int32(0), state, reading, out),
    )
    return state, reading, out


def _going(
    state: DecodeState,
    steps: int,
    limit: Int[Array, ""] | None,
    until: Int[Array, ""] | None,
) -> Callable[[Int[Array, ""], DecodeState], Bool[Array, ""]]:
    """Returns (steps done, state) -> whether to draw on."""
    limit = jnp.int32(steps) if limit is None else limit
    before = state.done

    def going(i, state):
        ended = jnp.sum(state.done & ~before, dtype=jnp.int32)
        return (i < limit) & (True if until is None else ended < until)

    return going


def _no_tokens(rows: int, steps: int, sampling: SamplingSpec) -> Tokens:
    """Returns the tokens [B, N] of rows that have drawn none."""
    tokens = jnp.full((rows, steps), -1, jnp.int32)
    if (count := sampling.logprobs) is None:
        return Tokens(tokens)
    each = jnp.zeros((rows, steps))
    top = jnp.zeros((rows, steps, count), jnp.int32)
    return Tokens(tokens, each, top, top.astype(each.dtype))


def _recorded(out: Tokens, step: Int[Array, ""], drawn: Tokens) -> Tokens:
    """Writes the tokens of one step into those of all."""
    return jax.tree.map(lambda all, new: all.at[:, step].set(new), out, drawn)


def _ends(token: Int[Array, "B"], eos: tuple[int, ...]) -> Bool[Array, "B"]:
    ends = jnp.asarray(eos, jnp.int32)
    return jnp.any(token[:, None] == ends[None, :], axis=-1)
