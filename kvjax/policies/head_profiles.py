"""Rules that first find out what kind of head or layer they deal with."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.attention_sums import average_attention, seen_by
from kvjax.policies.base import (
    Policy,
    check_counts,
    check_range,
    memoized,
    recent_mask,
    scatter_new,
    select_evictions,
    zeros_per_slot,
)
from kvjax.policies.combinators import by_size
from kvjax.policies.keys import key_diff
from kvjax.policies.observation_window import asked, asking
from kvjax.types import Observation, Stats, UserError, View


@memoized
def fastgen(
    recover: float = 0.95,
    sinks: int = 4,
    special: tuple[int, ...] = (),
    punctuation: tuple[int, ...] = (),
    heavy: int = 64,
    local: int = 64,
) -> Policy:
    """Keeps, in each head, the cheapest set that recovers its attention on the prompt.

        S1 = the first `sinks` tokens and those in `special`
        S2 = S1 and those in `punctuation`
        S3 = S2 and the `heavy` pairs with the largest summed weights among the others
        S4 = S3 and the newest `local` pairs of every query
        S5 = all pairs
        a head's set = the first whose share of the prompt's attention is >= `recover`
        score = average weight within the set, -inf outside, +inf for the sinks

    The choice is made while the prompt is read and holds from then on. A head that
    needs few pairs leaves the rest of its slots empty: live bytes fall, allocated ones
    do not. Where the budget is too small for a head's set, the lowest average weights
    go.

    Args:
      recover: share of attention, from 0 to 1; the paper's 0.95.
      sinks: first tokens that count as special.
      special: ids of special tokens.
      punctuation: ids of punctuation tokens.
      heavy: heavy hitters, pairs; the paper has 30% of the prompt.
      local: window, tokens; the paper has 30% of the prompt.

    Needs: attn_sum, tokens, and attn_weights, for what falls into each query's own
      window.
    Source: FastGen (Ge et al. 2024), arXiv 2310.01801, Algorithms 1 and 2; the sinks
      from cold-compress. Shares are of the attention that live pairs have received,
      which after a prompt read without eviction is all of it.
    Raises:
      UserError: a share outside 0 .. 1, a negative number of pairs, an id that is none.
    """
    check_range("fastgen", 0, 1, recover=recover)
    check_counts("fastgen", 0, sinks=sinks, heavy=heavy, local=local)
    for name, ids in (("special", special), ("punctuation", punctuation)):
        if not isinstance(ids, tuple):
            raise UserError(f"fastgen({name}={ids!r}): a list of token ids")
        for token in ids:
            check_counts("fastgen", 0, token=token)

    def init(spec, batch, capacity):
        pairs = tuple(zeros_per_slot(spec, batch, capacity) for _ in range(3))
        return Stats(pairs, jnp.zeros((batch, spec.num_kv_heads), jnp.int32))

    def sets(slots, view) -> list[Array]:
        attn_sum, _, kind = slots
        first = (view.positions < sinks) | (kind == _SPECIAL)
        second = first | (kind == _PUNCTUATION)
        others = jnp.where(second | (view.positions < 0), -1.0, attn_sum)
        held = jnp.sum(view.positions >= 0, axis=-1, dtype=jnp.int32)
        light = select_evictions(others, view.positions, jnp.maximum(held - heavy, 0))
        light = light | (others < 0)
        third = second | ~light
        return [first, second, third, third | recent_mask(view, local)]

    def choose(slots, view):
        attn_sum, near, _ = slots
        live = view.positions >= 0
        *fixed, _ = sets(slots, view)
        shares = [jnp.sum(attn_sum, axis=-1, where=each & live) for each in fixed]
        outside = live & ~fixed[-1]
        shares.append(shares[-1] + jnp.sum(near, axis=-1, where=outside))
        enough = jnp.sum(attn_sum, axis=-1, where=live) * recover
        short = [share < enough for share in shares]
        return jnp.sum(jnp.cumprod(jnp.stack(short).astype(jnp.int32), axis=0), axis=0)

    def observe(stats, view, observation):
        attn_sum, near, kind = stats.per_slot
        new = _kind(observation, special, punctuation, kind)
        kind = scatter_new(view, observation, new, kind)
        attn_sum = attn_sum + observation.attn_sum
        if not observation.is_prefill:
            return Stats((attn_sum, near, kind), stats.per_row)
        slots = (attn_sum, near + _nearby(view, observation, local), kind)
        return Stats(slots, choose(slots, view))

    def score(stats, view):
        attn_sum = stats.per_slot[0]
        every = jnp.ones_like(attn_sum, dtype=bool)
        choices = jnp.stack([*sets(stats.per_slot, view), every], axis=2)
        choice = stats.per_row[..., None, None]
        kept = jnp.take_along_axis(choices, choice, axis=2)[:, :, 0]
        kept = kept | jnp.isnan(attn_sum)
        average = jnp.where(kept, attn_sum / seen_by(view), -jnp.inf)
        return jnp.where(view.positions < sinks, jnp.inf, average)

    return Policy(
        init=init,
        observe=observe,
        score=score,
        required_stats=frozenset({"attn_sum", "attn_weights", "tokens"}),
        name="fastgen",
        num_pinned=sinks,
    )


@memoized
def simlayerkv(
    threshold: float = 0.9, sinks: int = 4, recent: int = 1024, queries: int = 32
) -> Policy:
    """Keeps only sinks and a window in lazy layers, and leaves the others alone.

        laziness = weight of the last `queries` queries on the first `sinks` tokens and
                   on the `recent` tokens up to their own; mean over queries and heads
        lazy     = laziness > threshold, for each row and layer
        score    = +inf for the sinks, position for the others;
                   -inf beyond sinks and window if lazy

    Some layers only look at the beginning and at what is near; they need nothing else.
    A layer that is not lazy keeps all that the budget allows, the newest first. Lazy
    ones leave slots empty: live bytes fall, allocated ones do not.

    Args:
      threshold: from 0 to 1; the authors' 0.9 for Llama-3, 0.65 for Llama-2, 0.8 for
        Mistral, 0.85 for Qwen2.
      sinks: first tokens; the paper's 4.
      recent: window; the paper's 1,024.
      queries: last queries that are asked; the paper's 32. With 1 it is the rule that
        the released code applies at the first decode step.

    Needs: queries, of which the last are remembered.
    Source: SimLayerKV (Zhang et al. 2024), arXiv 2410.13846. The released code counts a
      pair twice that is both sink and recent; here it counts once.
    Raises:
      UserError: a threshold outside 0 .. 1, numbers that are too small.
    """
    check_range("simlayerkv", 0, 1, threshold=threshold)
    check_counts("simlayerkv", 0, sinks=sinks)
    check_counts("simlayerkv", 1, recent=recent, queries=queries)

    def score(ring, view):
        near = recent_mask(view, recent) | (view.positions < sinks)
        kept = near | ~_lazy(ring, view)[:, None, None]
        position = jnp.where(kept, view.positions.astype(jnp.float32), -jnp.inf)
        return jnp.where(view.positions < sinks, jnp.inf, position)

    def _lazy(ring, view):
        weights = asked(ring, view)  # [B, K, G, W, C]
        since = (ring.after - recent)[:, None, :, None]  # [B, 1, W, 1]
        pos = view.positions[:, :, None]
        near = (pos >= since) | (pos < sinks)
        total = jnp.einsum("bkgwc,bkwc->bk", weights, near.astype(jnp.float32))
        total = view.gather_heads(total)  # [B, H]
        heads = total.shape[1] * weights.shape[2]
        count = jnp.maximum(jnp.sum(ring.after > 0, axis=1), 1) * heads
        return jnp.sum(total, axis=1) / count.astype(jnp.float32) > threshold

    policy = asking("simlayerkv", queries, score, num_pinned=sinks)
    return policy._replace(needs_all_heads=True)


_SPECIAL, _PUNCTUATION = 1.0, 2.0  # kinds of token; 0 is any other


def _kind(
    observation: Observation,
    special: tuple[int, ...],
    punctuation: tuple[int, ...],
    like: Float[Array, "B K C"],
) -> Float[Array, "B K T"]:
    def among(ids):
        ids = jnp.asarray(ids or (-1,), jnp.int32)
        return jnp.any(observation.tokens[..., None] == ids[None, None], axis=-1)

    kind = jnp.where(among(punctuation), _PUNCTUATION, 0.0)
    kind = jnp.where(among(special), _SPECIAL, kind)[:, None]
    return jnp.broadcast_to(kind, (*like.shape[:2], kind.shape[-1]))


def _nearby(view: View, observation: Observation, local: int) -> Float[Array, "B K C"]:
    """Attention from queries at most local - 1 tokens after the pair."""
    behind = observation.positions[:, None, :, None] - view.positions[:, :, None]
    inside = (behind < local).astype(jnp.float32)  # [B, K, T, C]
    weights = jnp.einsum("bkgtc,bktc->bkgc", observation.attn_weights, inside)
    return jnp.mean(weights, axis=2)


def retrieval_heads(above: float = 1.2) -> Policy:
    """KeyDiff in heads that keep many pairs, average attention in the others.

        score = KeyDiff's in heads with |kv| > above * mean over all heads,
                else average attention's

    A few heads fetch what was said long ago, and need pairs that are unlike each other,
    looked at or not; the others go on with the text, and need what they look at. Which
    is which is in their sizes, under a budget that gives heads what they need:
    `budget="25%"`, or the budget rule `calibrated`. Where all heads keep alike this is
    KeyDiff. A share such as "25%" keeps a quarter alike, so that heads which no text's
    repetition asks much of can still hold what is said again and again.

    Args:
      above: from how many times the mean on a head keeps many.

    Source: DuoAttention (Xiao et al. 2024), arXiv 2410.10819, for heads of two kinds;
      its retrieval heads keep all pairs and are found by training, its others stream.
    Raises:
      UserError: a negative number.
    """
    return by_size(key_diff(), average_attention(), above)._replace(even=0.25)
