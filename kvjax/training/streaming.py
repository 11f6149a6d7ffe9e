"""A text read as eviction has it, so that the loss has a gradient by every head's size.

Algorithm 1 (Batch-Max, `kvjax.cache.update`) with one slot for every token, none used
twice: what has gone is masked, and its place in the order of staying is known. A size
is a number, not a shape, so one program reads with all sizes, and the gradient by it is
that of the pairs next to the cut: what they would add if one more stayed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention import reference
from kvjax.cache import head_groups
from kvjax.models import decoder
from kvjax.policies import Policy, base
from kvjax.types import EMPTY, ModelSpec, Observation, PyTree, Stats, View

WIDTH = 12.0  # pairs about the cut that tell what one more is worth
_LEAST = 1e-9  # of a weight: what has gone keeps a gradient by it
_LATER = jnp.iinfo(jnp.int32).max


class Reader(NamedTuple):
    """Who evicts, and how; static.

    Attributes:
      policy: which pairs stay.
      kinds: pairs of every head as the policy's views have them (`View.budget`), which
        are static: a rule by sizes goes by these.
      mean: pairs per head.
      chunk: tokens read, and pairs dropped, at a time.
    """

    policy: Policy
    kinds: tuple[head_groups.Sizes, ...]
    mean: int
    chunk: int


class _Held(NamedTuple):
    """A part's pairs while a text is read; slot t is token t's.

    Attributes:
      pos: the token's position while its pair is held, -1 otherwise.
      gone: the chunk that it went in; `_LATER` while it is held, -1 before it came.
      stats: the policy's.
    """

    pos: Int[Array, "1 K T"]
    gone: Int[Array, "1 K T"]
    stats: Stats


def read_whole(
    params: PyTree, spec: ModelSpec, tokens: Int[Array, "1 T"]
) -> Float[Array, "1 T M"]:
    """The hidden states of a text of which all pairs stay."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def attend(index, q, k, v, ops, cache):
        q, k = ops.apply_rope(q), ops.apply_rope(k)
        slots = jnp.broadcast_to(positions[None], k.shape[:3])
        every = jnp.full((1,), q.shape[3], jnp.int32)
        given = q, k, v, slots, positions, every, frozenset(), ops.scoring
        return reference.normalize(reference.attend(*given)[0]).astype(q.dtype), cache

    return decoder.forward(params, spec, tokens, positions, (), attend)[0]


def read(
    params: PyTree,
    spec: ModelSpec,
    tokens: Int[Array, "1 T"],
    sizes: Float[Array, "L K"],
    reader: Reader,
) -> Float[Array, "1 T M"]:
    """The hidden states of a text, whose T is a multiple of the chunk.

    Args:
      sizes: |kv| of every head, whole numbers; T or more evicts nothing.
    """
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def attend(index, q, k, v, ops, cache):
        q, k = ops.apply_rope(q), ops.apply_rope(k)
        layer = functools.partial(_layer, spec, index, ops.scoring, reader)
        return jax.checkpoint(layer)(q, k, v, sizes[index]), cache

    hidden, _ = decoder.forward(params, spec, tokens, positions, (), attend)
    return hidden


def _layer(spec, index, scoring, reader: Reader, q, k, v, sizes):
    """One layer's attention, part by part."""
    heads = head_groups.of_sizes(reader.kinds[index])
    found = [
        _part(
            *(head_groups.spec_of(spec, part), index, part, scoring, reader),
            *(head_groups.take(x, part) for x in (q, k, v)),
            head_groups.take(sizes, part, axis=0),
        )
        for part in heads
    ]
    return head_groups.concatenate(found, heads)


def _part(spec, index, part, scoring, reader: Reader, q, k, v, sizes):
    """Attention of heads that a policy sees alike, chunk after chunk.

    Args:
      q: [1, K, G, T, D].
      k, v: [1, K, T, D].
      sizes: [K].
    """
    total, chunk, policy = k.shape[2], reader.chunk, reader.policy
    every = jnp.arange(total, dtype=jnp.int32)[None, None]
    view = functools.partial(
        View,
        keys=lambda: lax.stop_gradient(k),
        values=lambda: lax.stop_gradient(v),
        layer=index,
        heads=None if part is None else jnp.asarray(part, jnp.int32),
        budget=head_groups.size_of(reader.kinds[index], part),
        mean_budget=reader.mean,
        scoring=scoring,
    )

    def a_chunk(held: _Held, given):
        number, q = given
        now = number * chunk + jnp.arange(chunk, dtype=jnp.int32)  # [T]
        held, kept = _make_room(held, number, sizes, view, reader)
        pos = jnp.where(every < now[0] + chunk, every, EMPTY)  # gone ones too
        pos = jnp.broadcast_to(pos, held.pos.shape)
        logits = reference.masked_logits(q, k, pos, now[None], scoring)
        weights = jax.nn.softmax(logits + jnp.log(kept + _LEAST)[:, :, None, None])
        out = jnp.einsum("bkgtc,bkcd->bkgtd", weights.astype(v.dtype), v)
        mine = (every >= now[0]) & (every < now[0] + chunk)
        held = held._replace(
            pos=jnp.where(mine, every, held.pos),
            gone=jnp.where(mine, _LATER, held.gone),
        )
        seen = Observation(
            jnp.full((1,), chunk, jnp.int32),
            now[None],
            attn_sum=lax.stop_gradient(jnp.mean(jnp.sum(weights, axis=3), axis=2)),
        )
        count = jnp.sum(held.pos >= 0, axis=-1, dtype=jnp.int32)
        stats = policy.observe(held.stats, view(held.pos, now[-1:], count), seen)
        return held._replace(stats=stats), out

    empty = jnp.full((1, spec.num_kv_heads, total), EMPTY, jnp.int32)
    held = _Held(empty, empty, policy.init(spec, 1, total))
    cut = rearrange(q, "b k g (n t) d -> n b k g t d", t=chunk)
    numbers = jnp.arange(total // chunk, dtype=jnp.int32)
    _, out = lax.scan(a_chunk, held, (numbers, cut))
    return rearrange(out, "n b k g t d -> b k g (n t) d").astype(q.dtype)


def _make_room(
    held: _Held, number: Int[Array, ""], sizes: Float[Array, "K"], view, reader: Reader
) -> tuple[_Held, Float[Array, "1 K T"]]:
    """Drops a chunk's pairs where it would not fit; says what is kept, 1 or 0.

    New pairs count as kept. The numbers have a gradient by the sizes.
    """
    live = held.pos >= 0
    count = jnp.sum(live, axis=-1, dtype=jnp.int32)  # [1, K]
    most = jnp.round(lax.stop_gradient(sizes)).astype(jnp.int32)[None]
    over = count + reader.chunk > most
    drop = jnp.where(over, count - (most - reader.chunk), 0)
    newest = number[None] * reader.chunk - 1
    seen = view(held.pos, newest, count - drop)
    scores = lax.stop_gradient(reader.policy.score(held.stats, seen))
    out = base.select_evictions(scores, held.pos, drop)
    held = held._replace(
        pos=jnp.where(out, EMPTY, held.pos), gone=jnp.where(out, number, held.gone)
    )
    came = held.gone >= 0
    order = _order(scores, live, held.gone)
    moves = jnp.any(came & ~(held.pos >= 0), axis=-1)  # before, sizes are no matter
    more = jnp.where(moves, (sizes - lax.stop_gradient(sizes))[None], 0.0)
    kept = ((count - drop).astype(jnp.float32) + more)[..., None]
    soft = jax.nn.sigmoid((kept - order - 0.5) / WIDTH)
    hard = ((held.pos >= 0) | ~came).astype(jnp.float32)
    return held, hard + soft - lax.stop_gradient(soft)


def _order(
    scores: Float[Array, "1 K T"],
    live: Bool[Array, "1 K T"],
    gone: Int[Array, "1 K T"],
) -> Float[Array, "1 K T"]:
    """The place of every pair in the order of staying, 0 the first.

    Those that were live come first, by score; then what had gone before, the last one
    first: it would be back first if there were more room.
    """
    first = jnp.where(live, _LATER, gone)
    places = jnp.lexsort((-scores, -first))
    return jnp.argsort(places).astype(jnp.float32)
