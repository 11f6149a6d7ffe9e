"""The steps of beam search over a whole model, after those of `kvjax.engine.steps`.

::

    prompts -> prefill -> compact -> expand -> search -> the best sequences
               B rows     B rows     B W rows

A prompt is read once, and its KV state is copied to the rows of its W beams. Each step
reads one token of every beam. Then beams whose parent is in another row get a copy of
its KV state, with the policy's statistics: beams evict independently of each other. A
frozen prefix that beams share would leave only the pairs after the prompt to copy.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache.spec import CacheSpec
from kvjax.engine.forward import forward
from kvjax.models import decoder
from kvjax.types import ModelSpec, PyTree, Struct

_NONE = -jnp.inf  # the score of a beam or a sequence that is not there


class SearchOptions(Struct):
    """What is searched for, per prompt.

    Attributes:
      max_new_tokens: i32[B], 1 to N.
      eos: i32[B, E], tokens that end a sequence; -1 for none.
      length_penalty: f32[B], see `extend`.
    """

    max_new_tokens: Array
    eos: Array
    length_penalty: Array


class Sequences(Struct):
    """W sequences of new tokens of each prompt.

    Attributes:
      tokens: i32[B, W, N], with the end token; -1 beyond the end.
      scores: f32[B, W]; -inf where there are fewer sequences.
    """

    tokens: Array
    scores: Array


class Beams(Struct):
    """The state of the search between two steps, without the KV state.

    Attributes:
      running: the beams, in the order of their rows of the KV state. Their scores are
        sums of log-probabilities.
      ended: the best sequences that have ended, the best first; for their scores see
        `extend`.
      open: bool[B], prompts whose result may still change.
    """

    running: Sequences
    ended: Sequences
    open: Array


def start(active: Bool[Array, "B"], num_beams: int, length: int) -> Beams:
    """Returns the search before the first token: one empty beam per prompt.

    Args:
      active: False for rows without a prompt.
      num_beams: W.
      length: N, the most tokens of a sequence.
    """
    tokens = jnp.full((len(active), num_beams, length), -1, jnp.int32)
    none = jnp.full(tokens.shape[:2], _NONE, jnp.float32)
    return Beams(
        running=Sequences(tokens, none.at[:, 0].set(0)),
        ended=Sequences(tokens, none),
        open=active,
    )


def extend(
    beams: Beams,
    logits: Float[Array, "B W V"],
    step: Int[Array, ""],
    options: SearchOptions,
) -> tuple[Beams, Int[Array, "B W"]]:
    """Extends every beam by one token, as transformers' beam search does.

    Among all continuations of a prompt's beams, those that end are the new sequences,
    if they are among the W most likely; the W most likely of the others run on. A
    sequence's score is the sum of its tokens' log-probabilities, divided by its length
    to the power of the length penalty. A prompt is done when it has W sequences and
    none would be replaced if the best running beam ended now (`early_stopping=False`).

    Args:
      beams: the state of the search.
      logits: those that follow each beam's last token.
      step: tokens that the running beams have.
      options: of each prompt.

    Returns:
      The state, and for each beam the one that it extends, of the same prompt; itself
      where a prompt is done.
    """
    _, width, vocab = logits.shape
    logprobs = jax.nn.log_softmax(logits, axis=-1) + beams.running.scores[:, :, None]
    count = min(width * (1 + options.eos.shape[1]), width * vocab)  # W do not end
    sums, index = jax.lax.top_k(logprobs.reshape(len(logprobs), -1), count)
    parents, token = index // vocab, (index % vocab).astype(jnp.int32)
    tokens = _gather(beams.running.tokens, parents).at[:, :, step].set(token)

    is_last = (step + 1 >= options.max_new_tokens)[:, None]
    ends = jnp.any(token[:, :, None] == options.eos[:, None], axis=-1) | is_last
    divisor = ((step + 1).astype(jnp.float32) ** options.length_penalty)[:, None]
    # A mask, and no slice: sliced twice, XLA's top_k is a sort of the vocabulary.
    is_likely = (jnp.arange(count, dtype=jnp.int32) < width)[None]
    in_time = ends & is_likely & beams.open[:, None]
    scores = jnp.where(in_time, sums / divisor, _NONE)
    ended, _ = _best(
        jnp.concatenate([beams.ended.scores, scores], axis=1),
        jnp.concatenate([beams.ended.tokens, tokens], axis=1),
        width,
    )
    running, chosen = _best(jnp.where(ends, _NONE, sums), tokens, width)
    better = running.scores[:, :1] / divisor > ended.scores[:, -1:]
    still = beams.open & (better & ~is_last)[:, 0]
    parents = jnp.take_along_axis(parents, chosen, axis=1)
    own = jnp.arange(width, dtype=jnp.int32)[None]
    order, parents = _in_place(jnp.where(still[:, None], parents, own))
    scores = jnp.take_along_axis(running.scores, order, axis=1)
    running = Sequences(_gather(running.tokens, order), scores)
    return Beams(running, ended, still), parents


def _in_place(
    parents: Int[Array, "B W"],
) -> tuple[Int[Array, "B W"], Int[Array, "B W"]]:
    """Orders beams so that the first child of every parent takes its parent's row.

    Returns:
      The beam for each row, and the row of its parent. A row that any beam extends
      stays as it is, so the others can be overwritten one after the other.
    """
    same = parents[:, :, None] == parents[:, None]  # [B, child, other child]
    is_first = ~jnp.any(jnp.tril(same, -1), axis=2)
    rows = jnp.arange(parents.shape[1], dtype=jnp.int32)[None, None]
    is_parent = jnp.any(parents[:, :, None] == rows, axis=1)
    free = jnp.argsort(is_parent, axis=1, stable=True)  # rows that no beam extends
    later = jnp.cumsum(~is_first, axis=1) - 1
    row = jnp.where(is_first, parents, jnp.take_along_axis(free, later, axis=1))
    order = jnp.argsort(row, axis=1)
    return order, jnp.take_along_axis(parents, order, axis=1)


def _best(
    scores: Float[Array, "B M"], tokens: Int[Array, "B M N"], count: int
) -> tuple[Sequences, Int[Array, "B W"]]:
    """Returns the sequences with the highest scores, and which they are."""
    scores, chosen = jax.lax.top_k(scores, count)
    return Sequences(_gather(tokens, chosen), scores), chosen


def _gather(x: Int[Array, "B M N"], chosen: Int[Array, "B W"]) -> Int[Array, "B W N"]:
    return jnp.take_along_axis(x, chosen[:, :, None], axis=1)


@functools.partial(jax.jit, static_argnames=("spec", "config", "num_beams", "dtype"))
def expand(
    state: cache.KVState,
    *,
    spec: ModelSpec,
    config: CacheSpec,
    num_beams: int,
    dtype: str,
) -> cache.KVState:
    """Returns a KV state of B W rows: W copies of each of the B rows, side by side."""
    first = jnp.arange(len(state.next_pos), dtype=jnp.int32) * num_beams
    slots = cache.capacities(state)
    rows = cache.init(spec, config, len(first) * num_beams, slots, jnp.dtype(dtype))
    copy = lambda i, rows: cache.insert(rows, state, first + i)
    return jax.lax.fori_loop(0, num_beams, copy, rows)


@functools.partial(
    jax.jit, static_argnames=("spec", "config", "length"), donate_argnames=("state",)
)
def search(
    params: PyTree,
    state: cache.KVState,
    logits: Float[Array, "B V"],
    active: Bool[Array, "B"],
    options: SearchOptions,
    *,
    spec: ModelSpec,
    config: CacheSpec,
    length: int,
) -> tuple[cache.KVState, Sequences]:
    """Searches for the most likely sequences after each of B prompts.

    Args:
      params: the model's weights, see `kvjax.engine.forward.with_policy`.
      state: B W rows, see `expand`; donated.
      logits: those that follow each prompt's last token.
      active: False for rows without a prompt.
      options: of each prompt.
      spec: the model's shape.
      config: configuration of the cache.
      length: N, the most tokens of a sequence.

    Returns:
      The KV state of the running beams, with the error bits of all beams there were,
      and the sequences. A prompt has fewer than W only if the vocabulary is too small.
    """
    prompts, vocab = logits.shape
    width = len(state.next_pos) // prompts
    same = jnp.broadcast_to(logits[:, None], (prompts, width, vocab))
    beams, _ = extend(start(active, width, length), same, jnp.int32(0), options)

    def step(carry):
        i, rows, beams = carry
        token = jax.lax.dynamic_index_in_dim(
            beams.running.tokens, i - 1, axis=2, keepdims=False
        )
        n = jnp.repeat(beams.open, width).astype(jnp.int32)
        hidden, rows = forward(params, spec, token.reshape(-1, 1), n, rows, config)
        logits = decoder.logits(params, hidden[:, 0], spec).reshape(same.shape)
        beams, parents = extend(beams, logits, i, options)
        return i + 1, _copied(rows, parents), beams

    unfinished = lambda carry: jnp.any(carry[2].open)
    carry = jax.lax.while_loop(unfinished, step, (jnp.int32(1), state, beams))
    return carry[1], carry[2].ended


def _copied(state: cache.KVState, parents: Int[Array, "B W"]) -> cache.KVState:
    """Copies every beam's parent to the beam's row, B rows at a time.

    The order of `_in_place` leaves sources as they are. Error bits stay in their row.
    """
    prompts, width = parents.shape
    rows = jnp.arange(prompts * width, dtype=jnp.int32)
    first = rows[::width, None]
    source = (first + parents).reshape(-1)
    moves = source != rows
    order = jnp.argsort(~moves, stable=True)

    def copy_some(i, state):
        chosen = jax.lax.dynamic_slice_in_dim(order, i * prompts, prompts)
        target = jnp.where(moves[chosen], chosen, len(rows))  # dropped
        return cache.insert(state, cache.select(state, source[chosen]), target)

    turns = (jnp.sum(moves, dtype=jnp.int32) + prompts - 1) // prompts
    moved = jax.lax.fori_loop(0, turns, copy_some, state)
    return moved.replace(error=moved.error | state.error)
