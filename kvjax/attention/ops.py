"""Masked attention over slots, with the statistics that policies need.

`kvjax.attention.reference` defines the result; `kvjax.attention.backends` chooses the
implementation.
"""

import functools

from jaxtyping import Array, Float, Int, Shaped

from kvjax.attention import reference
from kvjax.attention.backends import Backend, select_backend
from kvjax.attention.inputs import AttentionSpec, Pairs, Queries
from kvjax.attention.reference import NO_STATS, merge
from kvjax.attention.stored import Stored, turned, unturned
from kvjax.types import ATTENTION_STATS, Observation, Partial

DEFAULT = AttentionSpec()


def attend(
    queries: Queries, pairs: Pairs, spec: AttentionSpec = DEFAULT
) -> tuple[Partial, Observation]:
    """Computes softmax attention of T queries over C slots, logits scaled by D ** -0.5.

    A query attends to the live slots whose position is at most its own. Empty slots get
    no weight; they must hold finite numbers, as fresh and evicted slots do.

    Returns:
      The unnormalised output, and the statistics that `spec` requests.

    Raises:
      UserError: a named implementation is unknown, or cannot run on this device or with
        these arguments; the message says why.
    """
    backend, queries, pairs, spec, back = _prepare(queries, pairs, spec)
    partial, seen = backend.attend(queries, pairs, spec)
    return _turned_back(partial, back), seen


def write_attend(
    queries: Queries,
    pairs: Pairs,
    new_k: Shaped[Array, "B K P"],
    new_v: Shaped[Array, "B K Q"],
    slot: Int[Array, "B K"],
    spec: AttentionSpec = DEFAULT,
) -> tuple[Partial, Observation, Array, Array]:
    """Writes each row's new KV pair and attends with its one query, in one kernel.

    Call it only where `fuses_write` returns True. The caller has already written the
    new positions into `pairs`, and the new scales of coded pairs: the kernel writes
    keys and values, or their codes. A slot >= C is not written. Also returns the
    updated arrays of K and V, in the same buffers.
    """
    backend, queries, pairs, spec, back = _prepare(queries, pairs, spec)
    partial, seen, *written = backend.write_attend(
        queries, pairs, new_k, new_v, slot, spec
    )
    return _turned_back(partial, back), seen, *written


def fuses_write(queries: Queries, pairs: Pairs, spec: AttentionSpec = DEFAULT) -> bool:
    """Returns whether to call `write_attend`; if not, the layout writes first."""
    backend = select_backend(queries, pairs, _computed(spec))
    if queries.q.shape[3] > 1 or backend.write_attend is None:
        return False
    inner = (x.inner if isinstance(x, Stored) else x for x in (pairs.k, pairs.v))
    grains = map(backend.write_grain, inner)
    return all(grain and pairs.k.shape[2] % grain == 0 for grain in grains)


def attend_segments(
    queries: Queries, segments: list[Pairs], spec: AttentionSpec = DEFAULT
) -> tuple[Partial, list[Observation]]:
    """Attends to slots in several arrays: splits, a shared prefix, a residual window.

    Every segment's statistics are taken under the softmax over all segments: their
    log-sum-exps are merged before any weight is computed, because weights already
    summed over queries cannot be renormalised.

    Args:
      queries: queries.
      segments: pairs with disjoint tokens; numbers of slots may differ.
      spec: static options.

    Returns:
      The merged attention, and one observation per segment.
    """
    plain = spec.replace(stats=NO_STATS)
    whole = functools.reduce(
        merge, [attend(queries, pairs, plain)[0] for pairs in segments]
    )
    return whole, [attention_stats(queries, pairs, whole, spec) for pairs in segments]


def attention_stats(
    queries: Queries, pairs: Pairs, whole: Partial, spec: AttentionSpec = DEFAULT
) -> Observation:
    """Computes only the statistics, under a softmax that is already known.

    Args:
      queries: queries.
      pairs: some of the pairs; their values are not read.
      whole: the softmax over all slots: its `max_logit` and `denominator`.
      spec: static options.
    """
    if not _computed(spec).stats:
        return Observation(num_tokens=queries.n, positions=queries.positions)
    keys = pairs._replace(v=None)
    backend, queries, keys, spec, _ = _prepare(queries, keys, spec)
    return backend.attention_stats(queries, keys, whole, spec)


def weights(
    queries: Queries, pairs: Pairs, spec: AttentionSpec = DEFAULT
) -> tuple[Float[Array, "B K G T C"], Partial, Observation]:
    """Computes the unnormalised attention weights, for callers that have no values yet.

    Runs in `jax.numpy` on every platform: no kernel stores the weights.

    Returns:
      exp(logit - max_logit), 0 at slots that a query may not attend to; their sums,
      with an output of zeros; the requested statistics.
    """
    return reference.weights(queries, pairs, _computed(spec))


def _computed(spec: AttentionSpec) -> AttentionSpec:
    """Drops the statistics that the caller computes."""
    return spec.replace(stats=spec.stats & ATTENTION_STATS)


def _prepare(
    queries: Queries, pairs: Pairs, spec: AttentionSpec
) -> tuple[Backend, Queries, Pairs, AttentionSpec, Array | None]:
    """Returns a backend, its arguments, and the rotation of the stored values."""
    spec = _computed(spec)
    backend = select_backend(queries, pairs, spec)
    k, turn = unturned(pairs.k)
    v, back = unturned(pairs.v)
    queries = queries._replace(q=turned(queries.q, turn))
    return backend, queries, pairs._replace(k=k, v=v), spec, back


def _turned_back(partial: Partial, back: Array | None) -> Partial:
    """Rotates the output back where the values are stored rotated by `back`."""
    return (
        partial if back is None else partial._replace(out=turned(partial.out, back.T))
    )
