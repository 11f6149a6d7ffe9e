"""Reads a text with eviction, differentiably with respect to every head's size.

Algorithm 1 (Batch-Max, `kvjax.cache.update`) with one slot per token and no slot used
twice: evicted pairs are masked, and their rank among all pairs is known. A size is a
traced number, not a shape, so one program serves all sizes. The gradient with respect
to a size comes from the pairs whose rank is next to it: what they would add to the loss
if one more pair were kept.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention import AttentionSpec, Pairs, Queries, reference
from kvjax.cache import head_groups
from kvjax.models import decoder
from kvjax.policies import Policy, base
from kvjax.types import EMPTY, ModelSpec, Observation, PyTree, Stats, View

WIDTH = 12.0  # of the sigmoid over ranks, in pairs, that replaces the hard cut
_LEAST = 1e-9  # weight of an evicted pair; above 0, so that log has a gradient
_LATER = jnp.iinfo(jnp.int32).max


class Reader(NamedTuple):
    """The static settings of eviction.

    Attributes:
      policy: ranks the pairs.
      kinds: budget of every head that the policy's views show (`View.budget`). It is
        static, unlike the sizes: a policy that depends on budgets reads these.
      mean: pairs per head, on average.
      chunk: tokens read, and pairs evicted, at a time.
    """

    policy: Policy
    kinds: tuple[head_groups.Sizes, ...]
    mean: int
    chunk: int


class _Held(NamedTuple):
    """The pairs of a head group while a text is read; slot t is token t's.

    Attributes:
      pos: the token's position while its pair is held, -1 otherwise.
      evicted_at: number of the chunk that evicted the pair; `_LATER` while it is held,
        -1 before its token is read.
      stats: the policy's statistics.
    """

    pos: Int[Array, "1 K T"]
    evicted_at: Int[Array, "1 K T"]
    stats: Stats


def read_whole(
    params: PyTree, spec: ModelSpec, tokens: Int[Array, "1 T"]
) -> Float[Array, "1 T M"]:
    """Returns the hidden states of a text read with the full cache."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def attend(index, q, k, v, ops, cache):
        q, k = ops.apply_rope(q), ops.apply_rope(k)
        slots = jnp.broadcast_to(positions[None], k.shape[:3])
        every = jnp.full((1,), q.shape[3], jnp.int32)
        queries, pairs = Queries(q, positions, every), Pairs(k, v, slots)
        options = AttentionSpec(scoring=ops.scoring)
        partial, _ = reference.attend(queries, pairs, options)
        return reference.normalize(partial).astype(q.dtype), cache

    return decoder.forward(params, spec, tokens, positions, (), attend)[0]


def read(
    params: PyTree,
    spec: ModelSpec,
    tokens: Int[Array, "1 T"],
    sizes: Float[Array, "L K"],
    reader: Reader,
) -> Float[Array, "1 T M"]:
    """Returns the hidden states of a text read with eviction.

    Args:
      params: weights.
      spec: the model's shape.
      tokens: ids; T is a multiple of `reader.chunk`.
      sizes: |kv| of every head, whole numbers; T or more evicts nothing.
      reader: the settings of eviction.
    """
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def attend(index, q, k, v, ops, cache):
        q, k = ops.apply_rope(q), ops.apply_rope(k)
        layer = functools.partial(_layer, spec, index, ops.scoring, reader)
        return jax.checkpoint(layer)(q, k, v, sizes[index]), cache

    hidden, _ = decoder.forward(params, spec, tokens, positions, (), attend)
    return hidden


def _layer(spec, index, scoring, reader: Reader, q, k, v, sizes):
    """Returns one layer's attention output, computed per head group."""
    groups = head_groups.of_sizes(reader.kinds[index])
    found = [
        _head_group(
            head_groups.spec_of(spec, group),
            index,
            group,
            scoring,
            reader,
            q=head_groups.take(q, group),
            k=head_groups.take(k, group),
            v=head_groups.take(v, group),
            sizes=head_groups.take(sizes, group, axis=0),
        )
        for group in groups
    ]
    return head_groups.concatenate(found, groups)


def _head_group(spec, index, group, scoring, reader: Reader, *, q, k, v, sizes):
    """Returns the attention output of a head group, computed chunk by chunk.

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
        heads=None if group is None else jnp.asarray(group, jnp.int32),
        budget=head_groups.size_of(reader.kinds[index], group),
        mean_budget=reader.mean,
        scoring=scoring,
    )

    def a_chunk(held: _Held, numbered_queries):
        number, q = numbered_queries
        now = number * chunk + jnp.arange(chunk, dtype=jnp.int32)  # [T]
        held, kept = _evict(held, number, sizes, view, reader)
        # Evicted pairs stay visible: `kept` masks them, which gives them a gradient.
        pos = jnp.where(every < now[0] + chunk, every, EMPTY)
        pos = jnp.broadcast_to(pos, held.pos.shape)
        logits = reference.masked_logits(q, k, pos, now[None], scoring)
        weights = jax.nn.softmax(logits + jnp.log(kept + _LEAST)[:, :, None, None])
        out = jnp.einsum("bkgtc,bkcd->bkgtd", weights.astype(v.dtype), v)
        mine = (every >= now[0]) & (every < now[0] + chunk)
        held = held._replace(
            pos=jnp.where(mine, every, held.pos),
            evicted_at=jnp.where(mine, _LATER, held.evicted_at),
        )
        observation = Observation(
            jnp.full((1,), chunk, jnp.int32),
            now[None],
            attn_sum=lax.stop_gradient(jnp.mean(jnp.sum(weights, axis=3), axis=2)),
        )
        count = jnp.sum(held.pos >= 0, axis=-1, dtype=jnp.int32)
        stats = policy.observe(held.stats, view(held.pos, now[-1:], count), observation)
        return held._replace(stats=stats), out

    empty = jnp.full((1, spec.num_kv_heads, total), EMPTY, jnp.int32)
    held = _Held(empty, empty, policy.init(spec, 1, total))
    cut = rearrange(q, "b k g (n t) d -> n b k g t d", t=chunk)
    numbers = jnp.arange(total // chunk, dtype=jnp.int32)
    _, out = lax.scan(a_chunk, held, (numbers, cut))
    return rearrange(out, "n b k g t d -> b k g (n t) d").astype(q.dtype)


def _evict(
    held: _Held, number: Int[Array, ""], sizes: Float[Array, "K"], view, reader: Reader
) -> tuple[_Held, Float[Array, "1 K T"]]:
    """Evicts the pairs that leave no room for the next chunk.

    Returns:
      The pairs held, and 1.0 for every pair that is held or not read yet, 0.0 for every
      evicted one, differentiable with respect to the sizes.
    """
    live = held.pos >= 0
    count = jnp.sum(live, axis=-1, dtype=jnp.int32)  # [1, K]
    most = jnp.round(lax.stop_gradient(sizes)).astype(jnp.int32)[None]
    over = count + reader.chunk > most
    drop = jnp.where(over, count - (most - reader.chunk), 0)
    newest = number[None] * reader.chunk - 1
    before_eviction = view(held.pos, newest, count - drop)
    scores = lax.stop_gradient(reader.policy.score(held.stats, before_eviction))
    evict = base.select_evictions(scores, held.pos, drop)
    held = held._replace(
        pos=jnp.where(evict, EMPTY, held.pos),
        evicted_at=jnp.where(evict, number, held.evicted_at),
    )
    came = held.evicted_at >= 0
    order = _order(scores, live, held.evicted_at)
    # Until a head evicts its first pair, its size has no effect, so no gradient.
    moves = jnp.any(came & ~(held.pos >= 0), axis=-1)
    # 0 in value: only the gradient by the size passes through.
    more = jnp.where(moves, (sizes - lax.stop_gradient(sizes))[None], 0.0)
    kept = ((count - drop).astype(jnp.float32) + more)[..., None]
    soft = jax.nn.sigmoid((kept - order - 0.5) / WIDTH)
    hard = ((held.pos >= 0) | ~came).astype(jnp.float32)
    # Straight-through: the value is `hard`, the gradient that of `soft`.
    return held, hard + soft - lax.stop_gradient(soft)


def _order(
    scores: Float[Array, "1 K T"],
    live: Bool[Array, "1 K T"],
    evicted_at: Int[Array, "1 K T"],
) -> Float[Array, "1 K T"]:
    """Returns the rank of every pair, 0 for the one to evict last.

    Live pairs come first, by score, then the evicted ones, the latest eviction first: a
    larger size would have kept these first.
    """
    first = jnp.where(live, _LATER, evicted_at)
    places = jnp.lexsort((-scores, -first))
    return jnp.argsort(places).astype(jnp.float32)
