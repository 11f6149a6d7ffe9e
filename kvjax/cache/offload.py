"""KCache: keys stay on the device, values lie in host memory and are fetched by need.

He and Wu 2024, arXiv 2404.18057. No pair is lost: every query is compared with all
keys, and of the values only those come over the link that get the largest weights::

    device    q . keys  ->  softmax  ->  top N       weights of the N  ->  output
                                           |               ^
    host                                   +--> values ----+    N of C, for every head

Prompts are read exactly: a block attends to all values of one layer, which come over
the link together and are dropped again.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import attention
from kvjax.cache.codecs import Codec
from kvjax.cache.layouts.base import first_of
from kvjax.parallel import host
from kvjax.policies import base
from kvjax.types import (
    ModelSpec,
    Observation,
    Partial,
    Scoring,
    UserError,
    build,
    real_number,
    whole_number,
)

QUERIES = ("union", "mean")


@dataclasses.dataclass(frozen=True)
class Offload:
    """Which values lie in host memory, and how many of them a query gets.

    Attributes:
      top_n: N, pairs per query whose values are fetched: those of the largest weights,
        of equal ones the newest. The others add nothing to the output.
      device_layers: L, how many layers at the input keep their values on the device.
        The paper says that L has little effect. From its Table 2, where N = 128 scores
        8.49 at L = 0 and 14.25 at L = 1, we infer that 1 is better than 0.
      renormalize: whether the weights of the N are made to sum to 1. The paper states
        no such step; without it an output lacks the share of what was not fetched, and
        we found predictions ten times as far off (docs/results/offload.md).
      queries: where G queries share a KV head, which the paper does not look at:
        `union`, each names N pairs, and all attend to what any of them named, up to
        G N; `mean`, the group names N by the mean of its weights.
      memory_gb: what values may take of the host, in units of 1e9 bytes; None is half
        of what is free there.
    """

    top_n: int = 64
    device_layers: int = 1
    renormalize: bool = True
    queries: str = "union"
    memory_gb: float | None = None

    def __post_init__(self):
        whole_number("offload top_n", self.top_n, 1)
        whole_number("offload device_layers", self.device_layers, 0)
        if not isinstance(self.renormalize, bool):
            raise UserError(
                f"offload renormalize is {self.renormalize!r}: give True or False"
            )
        if self.queries not in QUERIES:
            raise UserError(
                f"offload queries {self.queries!r} is unknown: use one of "
                + ", ".join(QUERIES)
            )
        if self.memory_gb is not None:
            given = real_number("offload memory_gb", self.memory_gb)
            if given <= 0:
                raise UserError(f"offload memory_gb {given}: must be larger than 0")

    def fetched(self, queries_per_kv_head: int) -> int:
        """The most values that a KV head fetches for one token."""
        return self.top_n * (queries_per_kv_head if self.queries == "union" else 1)


def make(given: Offload | int | Mapping[str, Any] | None) -> Offload | None:
    """An `Offload`, from its `top_n` or its fields too; None stays None.

    Raises:
      UserError: something else, or fields that are unknown or out of range.
    """
    if given is None or isinstance(given, Offload):
        return given
    if isinstance(given, Mapping):
        return build(Offload, given, "offload")
    return Offload(top_n=whole_number("offload", given, 1))


def check(offload: Offload, spec: ModelSpec) -> None:
    """Raises UserError where no layer is left to offload, or without host memory."""
    if offload.device_layers >= spec.num_layers:
        raise UserError(
            f"offload device_layers {offload.device_layers}: {spec.name} has "
            f"{spec.num_layers} layers; with all of them on the device nothing is left "
            "to offload"
        )
    host.check()


def codec_of(codec: Codec, layer: int, offload: Offload) -> Codec:
    """How a layer's pairs are stored: values in host memory from layer L on."""
    if layer < offload.device_layers:
        return codec
    return codec._replace(value=codec.value._replace(on_host=True))


class Choice(NamedTuple):
    """The pairs whose values are wanted, for every query's token of every head.

    Attributes:
      slots: theirs, below C.
      there: False for those that stand for none, where fewer than N are seen.
      weights: theirs for every query, 0 for none.
      sums: the partial attention over all pairs, its output still to come.
      seen: statistics of the weights of all pairs.
    """

    slots: Int[Array, "B K T N"]
    there: Bool[Array, "B K T N"]
    weights: Float[Array, "B K G T N"]
    sums: Partial
    seen: Observation


def choose(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K C D"],
    pos: Int[Array, "B K C"],
    q_pos: Int[Array, "B T"],
    n: Int[Array, "B"],
    stats: frozenset[str],
    scoring: Scoring,
    offload: Offload,
) -> Choice:
    """The pairs of the largest weights, whose values `attended` wants.

    Args:
      q: queries.
      k: keys as attention sees them.
      pos: position of each slot's pair, -1 for an empty slot.
      q_pos: position of each query.
      n: real queries per row.
      stats: statistics of the weights to return.
      scoring: what happens to the products.
      offload: N, and whose.
    """
    weights, sums, seen = attention.weights(q, k, pos, q_pos, n, stats, scoring)
    chosen = _chosen(weights, sums.denominator, pos, offload)
    most = min(offload.fetched(q.shape[2]), pos.shape[2])
    slots = first_of(chosen, most)
    there = slots < pos.shape[2]
    slots = jnp.where(there, slots, 0)
    named = jnp.broadcast_to(slots[:, :, None], (*weights.shape[:4], most))
    some = jnp.take_along_axis(weights, named, axis=-1)
    some = jnp.where(there[:, :, None], some, 0.0)
    return Choice(slots, there, some, sums, seen)


def attended(
    choice: Choice, values: Float[Array, "B K TN D"], offload: Offload
) -> Partial:
    """Attention by the values of the pairs chosen, in their slots' order."""
    values = values.reshape(*choice.slots.shape, -1)
    values = jnp.where(choice.there[..., None], values, 0)  # empty slots hold anything
    out = jnp.einsum(
        "bkgtn,bktnd->bkgtd",
        choice.weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    sums = choice.sums._replace(out=out)
    if not offload.renormalize:
        return sums
    return sums._replace(denominator=jnp.sum(choice.weights, -1))


def _chosen(
    weights: Float[Array, "B K G T C"],
    denominator: Float[Array, "B K G T"],
    pos: Int[Array, "B K C"],
    offload: Offload,
) -> Bool[Array, "B K T C"]:
    """The pairs that are fetched for every token."""
    some = jnp.where(denominator != 0, denominator, 1.0)
    share = weights / some[..., None]
    if offload.queries == "mean":
        share = jnp.mean(share, axis=2, keepdims=True)
    count = share.shape[2] * share.shape[3]
    slots = pos.shape[2]
    flat = share.reshape(len(pos), -1, slots)
    here = jnp.repeat(pos, count, axis=1)
    beyond = jnp.sum(here >= 0, axis=-1, dtype=jnp.int32) - offload.top_n
    gone = base.select_evictions(flat, here, jnp.maximum(beyond, 0))
    kept = ((here >= 0) & ~gone).reshape(share.shape)
    return jnp.any(kept, axis=2)
