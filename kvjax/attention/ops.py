"""Masked attention over slots, with the statistics that policies need.

`kvjax.attention.reference` defines the result; `kvjax.attention.backends` chooses the
implementation.
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
    """Computes softmax attention of T queries over C slots, logits scaled by D ** -0.5.

    A query attends to the live slots whose position is at most its own. Empty slots get
    no weight; they must hold finite numbers, as fresh and evicted slots do.

    Args:
      q: queries.
      k: keys, one per slot; decoded, or as their codec stores them.
      v: values, one per slot; likewise.
      pos: position of each slot's KV pair, -1 for an empty slot.
      q_pos: position of each query.
      n: number of real queries per row; the rest of the T are padding at the end.
      stats: statistics of the weights to return, see `kvjax.types.Observation`; names
        outside `ATTENTION_STATS` are ignored, the caller computes them.
      implementation: name of a backend of `kvjax.attention.backends`; None chooses the
        fastest that can run.
      scoring: soft cap on the logits, and sliding window of a query.

    Returns:
      The unnormalised output, and the requested statistics.

    Raises:
      UserError: a named implementation is unknown, or cannot run on this device or with
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
    """Writes each row's new KV pair and attends with its one query, in one kernel.

    Call it only where `fuses_write` returns True. The caller has already written the
    new positions into `pos`, and the new scales of coded pairs: the kernel writes keys
    and values, or their codes. A slot >= C is not written. Also returns the updated
    arrays of K and V, in the same buffers.
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
    """Returns whether to call `write_attend`; if not, the layout writes first."""
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
    """Attends to slots in several arrays: splits, a shared prefix, a residual window.

    Every segment's statistics are taken under the softmax over all segments: their
    log-sum-exps are merged before any weight is computed, because weights already
    summed over queries cannot be renormalised.

    Args:
      q: queries.
      segments: (k, v, pos) of each, with disjoint tokens; numbers of slots may differ.
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
    """Computes only the statistics, under a softmax that is already known.

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
    """Computes the unnormalised attention weights, for callers that have no values yet.

    Runs in `jax.numpy` on every platform: no kernel stores the weights.

    Returns:
      exp(logit - max_logit), 0 at slots that a query may not attend to; their sums,
      with an output of zeros; the requested statistics.
    """
    return reference.weights(q, k, pos, q_pos, n, stats & ATTENTION_STATS, scoring)


def _turned_back(partial: Partial, back: Array | None) -> Partial:
    """Rotates the output back where the values are stored rotated by `back`."""
    return (
        partial if back is None else partial._replace(out=turned(partial.out, back.T))
    )
