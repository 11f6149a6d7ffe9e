"""The interface of policies (`Policy`), and the selection by scores.

A policy ranks the cached pairs by pure functions over arrays. It knows no model, layout
or budget, so it runs in any JAX code. `select_evictions` turns scores into the mask of
evicted pairs.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.registry import bound
from kvjax.types import OBSERVABLE, Observation, PyTree, Stats, UserError, View


class LayerParams:
    """The weights of a learned policy: a pytree of arrays per layer.

    Policies are static arguments of compiled programs, and weights must not be static.
    So hash and equality compare only structure, shapes and dtypes, and other weights of
    the same shapes reuse the program. The caller passes `layers` to the program as an
    ordinary argument, and each layer's pytree to the policy as `View.params`.

    Attributes:
      layers: the pytrees, in the order of the layers.
    """

    def __init__(self, layers: Iterable[PyTree]):
        self.layers = jax.tree.map(jnp.asarray, tuple(layers))
        leaves, structure = jax.tree.flatten(self.layers)
        self._kind = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerParams) and self._kind == other._kind

    def __hash__(self) -> int:
        return hash(self._kind)

    def __repr__(self) -> str:
        return f"LayerParams({len(self.layers)} layers)"


class Policy(NamedTuple):
    """An eviction policy: three pure functions, and what they need from attention.

    Attributes:
      init: (spec, B, C) -> `Stats`, all zeros or empty. `spec` is anything with
        `num_kv_heads`, `queries_per_kv_head` and `head_dim`. The caller zeroes the
        `per_slot` statistics of a new pair, and moves them when the pair changes slots.
      observe: (stats, view, observation) -> stats, after each attention call.
      score: (stats, view) -> f32[B, K, C]. The lowest are evicted, the older of equals
        first. +inf pins a pair. -inf evicts it even if the budget has room for it,
        which lets a policy keep fewer pairs in some heads than in others. Scores of
        empty slots are ignored.
      required_stats: what attention has to return, of `kvjax.types.OBSERVABLE`. With an
        empty set, the fastest attention runs.
      name: as in the registry, for reports.
      num_pinned: pairs per head that are never evicted; a budget must be larger.
      needs_all_heads: whether `score` calls `View.gather_heads`, a collective where
        heads are split over devices.
      even: default of `even` for a budget such as "25%", which is calibrated per head:
        how far the sizes are interpolated towards uniform ones, from 0 to 1, see
        `kvjax.cache.budgets.calibrated`.
      params: weights of a learned policy, see `with_params`; None for all others.
    """

    init: Callable[..., Stats]
    observe: Callable[[Stats, View, Observation], Stats]
    score: Callable[[Stats, View], Float[Array, "B K C"]]
    required_stats: frozenset[str]
    name: str
    num_pinned: int = 0
    needs_all_heads: bool = False
    even: float = 0.0
    params: LayerParams | None = None

    def __repr__(self) -> str:
        return f"Policy({self.name!r})"


def with_params(policy: Policy, layers: Iterable[PyTree]) -> Policy:
    """Returns the policy with these weights, one pytree of arrays per layer.

    `observe` and `score` read their layer's as `view.params`. Where heads are split
    over devices, every device gets the whole pytree: a policy with weights per head
    selects its own by `own_heads`.
    """
    return policy._replace(params=LayerParams(layers))


def check_params(policy: Policy, num_layers: int) -> None:
    """Raises UserError unless a learned policy has weights for every layer."""
    if policy.params and len(policy.params.layers) != num_layers:
        raise UserError(
            f"policy {policy.name!r} has weights for {len(policy.params.layers)} "
            f"layers, the model has {num_layers}: give one pytree per layer"
        )


def memoized(factory: Callable[..., Policy]) -> Callable[..., Policy]:
    """Wraps a factory so that equal arguments return the same policy object.

    Policies are static arguments of compiled programs: another object would compile
    again. Arguments that cannot be hashed, such as arrays, are never equal.

    Policies among the arguments are compared without their weights, and the result
    carries the weights: those of one policy unchanged, those of several as a tuple per
    layer with one entry for each policy, None for a policy without weights.
    """
    signature = inspect.signature(factory)
    known = functools.lru_cache(maxsize=None, typed=True)(factory)  # True is not 1

    @functools.wraps(factory)
    def build(*args, **options):
        call = bound(f"policy {factory.__name__!r}", signature, *args, **options)
        call.apply_defaults()
        values = [_hashable(value) for value in call.arguments.values()]
        try:
            hash(tuple(values))
        except TypeError:
            return factory(*values)
        leaves = jax.tree.leaves(values, is_leaf=_is_policy)
        params = [leaf.params for leaf in leaves if _is_policy(leaf)]
        if not any(params):
            return known(*values)
        bare = jax.tree.map(_without_params, values, is_leaf=_is_policy)
        return known(*bare)._replace(params=_joined(params))

    return build


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _is_policy(value: Any) -> bool:
    return isinstance(value, Policy)


def _without_params(value: Any) -> Any:
    return value._replace(params=None) if _is_policy(value) else value


def _joined(params: list[LayerParams | None]) -> LayerParams:
    """Joins the weights of several policies layer by layer."""
    if len(params) == 1:
        return params[0]
    counts = {len(each.layers) for each in params if each}
    if len(counts) > 1:
        raise UserError(
            f"policies with weights for {' and '.join(map(str, sorted(counts)))} "
            "layers do not go together: give one pytree per layer"
        )
    (count,) = counts
    layers = [each.layers if each else (None,) * count for each in params]
    return LayerParams(zip(*layers, strict=True))


def stateless(name: str, score: Callable[[View], Array], num_pinned: int = 0) -> Policy:
    """Returns a policy without statistics: its score depends on the view only."""
    return Policy(
        init=lambda spec, batch, capacity: Stats(),
        observe=lambda stats, view, observation: stats,
        score=lambda stats, view: score(view),
        required_stats=frozenset(),
        name=name,
        num_pinned=num_pinned,
    )


def zeros_per_slot(spec, batch: int, capacity: int, *trailing: int) -> Array:
    """Returns zeros f32[B, K, C, ...], for a statistic of every pair."""
    return jnp.zeros((batch, spec.num_kv_heads, capacity, *trailing), jnp.float32)


def recent_mask(view: View, count: int | Array) -> Bool[Array, "B K C"]:
    """Marks the pairs of the last `count` tokens (an int, or i32[B, K])."""
    if not isinstance(count, int):
        count = count[..., None]
    return view.positions > view.query_position[:, None, None] - count


def own_heads(view: View, x: Shaped[Array, "B H ..."]) -> Shaped[Array, "B K ..."]:
    """Selects the view's heads from an array over all heads of the layer."""
    return x if view.heads is None else jnp.take(x, view.heads, axis=1)


def head_numbers(view: View) -> Int[Array, "K"]:
    """Returns the indices, in the whole layer, of the view's heads."""
    if view.heads is not None:
        return view.heads
    return jnp.arange(view.positions.shape[1], dtype=jnp.int32)


def real_mask(observation: Observation, last: int | None = None) -> Bool[Array, "B T"]:
    """Marks the new tokens that are no padding, or only the `last` of them."""
    step = jnp.arange(observation.positions.shape[1], dtype=jnp.int32)[None]
    count = observation.num_tokens[:, None]
    real = step < count
    return real if last is None else real & (step >= count - last)


def scatter_new(
    view: View,
    observation: Observation,
    new: Float[Array, "B K T"],
    old: Float[Array, "B K C"],
) -> Float[Array, "B K C"]:
    """Returns `old` with `new` written to the slots of the new tokens' pairs."""
    step = view.positions - observation.positions[:, :1, None]  # of the new tokens
    fresh = (step >= 0) & (step < observation.num_tokens[:, None, None])
    step = jnp.clip(step, 0, new.shape[-1] - 1)
    return jnp.where(fresh, jnp.take_along_axis(new, step, axis=2), old)


def check_counts(where: str, least: int, **counts: int) -> None:
    """Raises UserError unless all counts are whole numbers of `least` or more."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < least:
            raise UserError(
                f"{where}({name}={count!r}): a whole number, {least} or more"
            )


def check_range(where: str, low: float, high: float, **values: float) -> None:
    """Raises UserError unless all values are finite and from `low` to `high`."""
    span = f"from {low:g} to {high:g}" if high < math.inf else f"of {low:g} or more"
    for name, value in values.items():
        number = isinstance(value, int | float) and math.isfinite(value)
        if not number or not low <= value <= high:
            raise UserError(f"{where}({name}={value!r}): a finite number {span}")


def check_choice(where: str, among: tuple[str, ...], **values: str) -> None:
    """Raises UserError unless every value is one of `among`."""
    for name, value in values.items():
        if value not in among:
            raise UserError(f"{where}({name}={value!r}): one of {', '.join(among)}")


def select_evictions(
    scores: Float[Array, "B K C"],
    positions: Int[Array, "B K C"],
    num_evict: Int[Array, "B"] | Int[Array, "B K"],
) -> Bool[Array, "B K C"]:
    """Marks the `num_evict` live slots of every head with the lowest scores.

    Slots with a score of -inf are marked beyond that number.

    Exact, without sorting: a radix descent finds the threshold bit by bit (four bits at
    a time on a GPU), with one pass over the scores each. Of the slots at the threshold,
    the oldest are marked, found in the same way by position. Sorting 2,048 slots to
    find 64 of them takes far longer on every backend.

    Args:
      scores: the lowest are marked; NaN counts as the highest.
      positions: position of the pair in each slot, -1 for empty slots (never marked).
      num_evict: number of slots to mark per head, at most the live ones: one number per
        row, or one per row and head.
    """
    live = positions >= 0
    num_evict = jnp.broadcast_to(
        num_evict.reshape(len(num_evict), -1), scores.shape[:2]
    )
    order = _sortable(scores)
    threshold = _kth(order, live, num_evict)
    below = live & (order < threshold[..., None])
    tied = live & (order == threshold[..., None])
    missing = num_evict - jnp.sum(below, axis=-1, dtype=jnp.int32)
    age = positions.astype(jnp.uint32)
    oldest = tied & (age < _kth(age, tied, missing)[..., None])
    return below | oldest | (live & jnp.isneginf(scores))


def validate(policy: Policy) -> Policy:
    """Returns the policy; UserError unless attention can return what it needs."""
    if not isinstance(policy, Policy):
        name = getattr(policy, "__name__", None)
        raise UserError(
            f"{name or policy!r:.80} is no Policy: make one, as in policies.h2o()"
        )
    if not isinstance(policy.required_stats, frozenset):
        raise UserError(
            f"policy {policy.name!r} has required_stats={policy.required_stats!r}: "
            "give a frozenset of names, as in frozenset({'attn_sum'})"
        )
    unknown = policy.required_stats - OBSERVABLE
    if unknown:
        raise UserError(
            f"policy {policy.name!r} needs {sorted(unknown)}: attention can hand over "
            f"{sorted(OBSERVABLE)}"
        )
    return policy


def _sortable(x: Float[Array, "B K C"]) -> Array:
    """Maps float32 to uint32 in the same order; -0 equals 0, NaN is the highest.

    Uses integer operations only: compilers drop `x + 0`, and may flush denormals.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    sign, infinity = jnp.uint32(1 << 31), jnp.uint32(0x7F800000)
    nan = (bits & ~sign) > infinity
    bits = jnp.where(bits == sign, jnp.uint32(0), bits)
    order = jnp.where(bits >= sign, ~bits, bits | sign)
    return jnp.where(nan, jnp.uint32(0xFFFFFFFF), order)


def _kth(order: Array, among: Bool[Array, "B K C"], k: Array) -> Array:
    """Returns, per head, the largest threshold with at most k of `among` below it."""
    return jax.lax.platform_dependent(
        order, among, k, cuda=_kth_by_digits, default=_kth_by_bits
    )


def _kth_by_bits(order: Array, among: Array, k: Array) -> Array:
    def try_bit(i, threshold):
        candidate = threshold | (jnp.uint32(1 << 31) >> jnp.uint32(i))
        below = among & (order < candidate[..., None])
        count = jnp.sum(below, axis=-1, dtype=jnp.int32)
        return jnp.where(count <= k, candidate, threshold)

    zero = jnp.zeros(order.shape[:2], jnp.uint32)
    return jax.lax.fori_loop(0, 32, try_bit, zero)


def _kth_by_digits(order: Array, among: Array, k: Array) -> Array:
    """Finds four bits per pass: on a GPU every pass costs one kernel launch."""
    order = jnp.where(among, order, jnp.uint32(0xFFFFFFFF))  # below no candidate
    digits = jnp.arange(1, 16, dtype=jnp.uint32)[None, None]

    def try_digits(i, threshold):
        shift = jnp.uint32(28) - 4 * i.astype(jnp.uint32)
        candidates = threshold[..., None] | digits << shift
        below = order[:, :, None] < candidates[..., None]  # [B, K, 15, C]
        fits = jnp.sum(below, axis=-1, dtype=jnp.int32) <= k[..., None]
        return threshold | jnp.sum(fits, axis=-1, dtype=jnp.uint32) << shift

    zero = jnp.zeros(order.shape[:2], jnp.uint32)
    return jax.lax.fori_loop(0, 8, try_digits, zero)
