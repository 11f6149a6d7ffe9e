"""Masked attention over slots, with the statistics that policies need.

What it means is in `kvjax.attention.reference`, and what runs in
`kvjax.attention.backends`.
"""

import functools

from jaxtyping import Array, Float, Int, Shaped

from kvjax.attention import reference
from kvjax.attention.backends import select_backend
from kvjax.attention.reference import NO_STATS, PLAIN, merge
from kvjax.attention.stored import Pairs, Stored, turned, unturned
from kvjax.types import ATTENTION_STATS, Observation, Partial, Scoring


def attend(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K C D"] | Stored,
    v: Float[Array, "B K C D"] | Stored,
    pos: Int[Array, "B K C"],
    q_pos: Int[Array, "B T"],
    n: Int[Array, "B"],
    stats: frozenset[str] = NO_STATS,
    implementation: str | None = None,
    scoring: Scoring = PLAIN,
) -> tuple[Partial, Observation]:
    """Softmax attention of T queries over C slots, logits scaled by D ** -0.5.

    A query sees the live slots whose position is not after its own. Empty slots get no
    weight; they must hold finite numbers, as a fresh or evicted slot does.

    Args:
      q: queries.
      k: keys, one per slot; as numbers, or as they are stored.
      v: values, one per slot; likewise.
      pos: position of each slot's pair, -1 for an empty slot.
      q_pos: position of each query.
      n: how many of a row's T queries are real; the others are padding at the end.
      stats: statistics of the weights to return, see `kvjax.types.Observation`; what
        attention does not know is left to the caller.
      implementation: the name of one of `kvjax.attention.backends`; None is the best
        that runs.
      scoring: a cap on the logits, a window on what a query sees.

    Returns:
      The unnormalised output, and the statistics asked for.

    Raises:
      UserError: a named implementation that is unknown, or cannot run here or with
        these arguments; the message says why.
    """
    stats = stats & ATTENTION_STATS
    backend = select_backend(q, k, stats, implementation, scoring)
    k, turn = unturned(k)
    v, back = unturned(v)
    q = turned(q, turn)
    partial, seen = backend.attend(q, k, v, pos, q_pos, n, stats, scoring)
    return _turned_back(partial, back), seen


def write_attend(
    q: Float[Array, "B K G 1 D"],
    new_k: Shaped[Array, "B K P"],
    new_v: Shaped[Array, "B K Q"],
    slot: Int[Array, "B K"],
    k: Float[Array, "B K C D"] | Stored,
    v: Float[Array, "B K C D"] | Stored,
    pos: Int[Array, "B K C"],
    q_pos: Int[Array, "B 1"],
    n: Int[Array, "B"],
    stats: frozenset[str],
    implementation: str | None,
    scoring: Scoring,
) -> tuple[Partial, Observation, Array, Array]:
    """`attend` for one query per row, with the write of its own pair fused in.

    Only where `fuses_write` says so. `pos` has the new pairs' positions already, and
    stored pairs their scales: what is written are keys and values, or their codes. A
    slot of C or more is not written. Returns these arrays of K and V as well, in the
    same buffers.
    """
    stats = stats & ATTENTION_STATS
    backend = select_backend(q, k, stats, implementation, scoring)
    k, turn = unturned(k)
    v, back = unturned(v)
    partial, seen, *pairs = backend.write_attend(
        turned(q, turn), new_k, new_v, slot, k, v, pos, q_pos, n, stats, scoring
    )
    return _turned_back(partial, back), seen, *pairs


def fuses_write(
    q: Array,
    k: Pairs,
    v: Pairs,
    stats: frozenset[str],
    implementation: str | None,
    scoring: Scoring,
) -> bool:
    """Whether `write_attend` should take these: elsewhere the layout writes first."""
    stats = stats & ATTENTION_STATS
    backend = select_backend(q, k, stats, implementation, scoring)
    if q.shape[3] > 1 or backend.write_attend is None:
        return False
    inner = (x.inner if isinstance(x, Stored) else x for x in (k, v))
    grains = map(backend.write_grain, inner)
    return all(grain and k.shape[2] % grain == 0 for grain in grains)


def attend_segments(
    q: Float[Array, "B K G T D"],
    segments: list[tuple[Array, Array, Array]],
    q_pos: Int[Array, "B T"],
    n: Int[Array, "B"],
    stats: frozenset[str] = NO_STATS,
    implementation: str | None = None,
    scoring: Scoring = PLAIN,
) -> tuple[Partial, list[Observation]]:
    """`attend` over slots that lie in several places: splits, a prefix, a window.

    The statistics of every segment are those of one softmax over all of them: its
    log-sum-exp is merged first, and the weights are taken with it. (Weights that are
    summed over queries cannot be put right afterwards.)

    Args:
      q: queries.
      segments: (k, v, pos) of each, disjoint; their numbers of slots may differ.
      q_pos: position of each query.
      n: real queries per row.
      stats: statistics to return.
      implementation: see `attend`.
      scoring: likewise.

    Returns:
      The merged attention, and one observation per segment.
    """
    parts = [
        attend(q, k, v, pos, q_pos, n, NO_STATS, implementation, scoring)[0]
        for k, v, pos in segments
    ]
    whole = functools.reduce(merge, parts)
    seen = [
        attention_stats(q, k, pos, q_pos, n, whole, stats, implementation, scoring)
        for k, _, pos in segments
    ]
    return whole, seen


def attention_stats(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K C D"] | Stored,
    pos: Int[Array, "B K C"],
    q_pos: Int[Array, "B T"],
    n: Int[Array, "B"],
    whole: Partial,
    stats: frozenset[str],
    implementation: str | None = None,
    scoring: Scoring = PLAIN,
) -> Observation:
    """The statistics alone, of weights under a softmax that is already known.

    Args:
      q: queries.
      k: keys of some slots.
      pos: their positions.
      q_pos: position of each query.
      n: real queries per row.
      whole: the softmax over all slots: its `max_logit` and `denominator`.
      stats: statistics to return.
      implementation: see `attend`.
      scoring: likewise.
    """
    stats = stats & ATTENTION_STATS
    if not stats:
        return Observation(num_tokens=n, positions=q_pos)
    backend = select_backend(q, k, stats, implementation, scoring)
    k, turn = unturned(k)
    q = turned(q, turn)
    return backend.attention_stats(q, k, pos, q_pos, n, whole, stats, scoring)


def weights(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K C D"],
    pos: Int[Array, "B K C"],
    q_pos: Int[Array, "B T"],
    n: Int[Array, "B"],
    stats: frozenset[str],
    scoring: Scoring,
) -> tuple[Float[Array, "B K G T C"], Partial, Observation]:
    """What `attend` would weigh values with, for whoever has to know before he has any.

    Plain `jax.numpy`, on every platform: the weights themselves are wanted.

    Returns:
      exp(logit - max_logit), 0 where a query sees no pair; their sums, with an output
      of zeros; the statistics asked for.
    """
    return reference.weights(q, k, pos, q_pos, n, stats & ATTENTION_STATS, scoring)


def _turned_back(partial: Partial, back: Array | None) -> Partial:
    """The output of values that were stored turned by `back`."""
    return (
        partial if back is None else partial._replace(out=turned(partial.out, back.T))
    )
